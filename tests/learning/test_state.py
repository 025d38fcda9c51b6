"""The optimiser: AdamW against its formulas in numpy, the schedule by hand, sharding of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cipo_jax.errors import UserError
from cipo_jax.learning.state import adamw


def test_schedule_golden():
    constant = adamw(learning_rate=2.0)
    assert [constant.rate(s) for s in (0, 10_000)] == [2.0, 2.0]
    linear = adamw(learning_rate=1.0, warmup_steps=4, decay_steps=10, decay_to=0.2)
    np.testing.assert_allclose([linear.rate(s) for s in (0, 1, 3, 4, 9, 14, 99)], [0.25, 0.5, 1, 1, 0.6, 0.2, 0.2])
    cosine = adamw(learning_rate=1.0, decay_steps=4, decay_shape="cosine")
    np.testing.assert_allclose([cosine.rate(s) for s in (0, 2, 4, 5)], [1, 0.5, 0, 0], atol=1e-7)
    assert linear.rate(3).dtype == np.float32


def test_adamw_against_its_formulas():
    rng = np.random.default_rng(0)
    optimizer = adamw(learning_rate=0.01, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3)
    params = {"kernel": rng.normal(size=(2, 3)), "input_norm": {"scale": rng.normal(size=(4, 3))}, "gain": np.ones(3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    decay = {"kernel": 0.3, "input_norm": {"scale": 0.0}, "gain": 0.0}
    expected = jax.tree.map(np.float64, params)
    m = v = jax.tree.map(np.zeros_like, expected)
    state = optimizer.init(params).opt_state
    for t in (1, 2, 3):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        direction, state = optimizer.transform.update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - 0.01 * d, params, direction)
        m = jax.tree.map(lambda a, g: 0.8 * a + 0.2 * g, m, grads)
        v = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * np.float64(g) ** 2, v, grads)
        expected = jax.tree.map(
            lambda p, a, b, w, t=t: p - 0.01 * (a / (1 - 0.8**t) / (np.sqrt(b / (1 - 0.9**t)) + 1e-3) + w * p),
            expected,
            m,
            v,
            decay,
        )
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), params, expected)


class Block(nnx.Module):
    def __init__(self):
        self.norm = nnx.RMSNorm(4, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(1))


def test_module_parameters_decay_by_name():
    """On the parameters of an NNX module: with zero gradients the step is the decay alone."""
    params = nnx.split(Block())[1]
    params = jax.tree.map(jnp.ones_like, params)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    optimizer = adamw(weight_decay=0.5)
    for tree in (params, stacked):
        zeros = jax.tree.map(jnp.zeros_like, tree)
        direction, _ = optimizer.transform.update(zeros, optimizer.init(tree).opt_state, tree)
        flat = {".".join(map(str, path)): np.unique(v[...]).tolist() for path, v in nnx.to_flat_state(direction)}
        assert flat == {"norm.scale": [0.0], "dense.kernel": [0.5], "dense.bias": [0.0]}
    everything = adamw(weight_decay=0.5, no_decay="$^")
    direction, _ = everything.transform.update(zeros, everything.init(stacked).opt_state, stacked)
    assert all(np.all(x == 0.5) for x in jax.tree.leaves(direction))


def test_moments_are_float32_for_bfloat16_parameters():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    dtypes = {x.dtype for x in jax.tree.leaves(adamw().init(params).opt_state) if x.ndim}
    assert dtypes == {jnp.dtype("float32")}
    small = adamw(moment_dtype="bfloat16").init(params).opt_state
    assert sorted(str(x.dtype) for x in jax.tree.leaves(small) if x.ndim) == ["bfloat16", "float32"]


def test_state_sharding_follows_the_parameters():
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    params = nnx.split(Block())[1]
    spec = PartitionSpec("fsdp")
    sharding = jax.tree.map(lambda _: NamedSharding(mesh, spec), params)
    optimizer = adamw()
    got = optimizer.state_sharding(params, sharding)
    state = jax.jit(optimizer.init, out_shardings=got)(params)
    assert jax.tree.structure(state) == jax.tree.structure(got)
    for leaf in jax.tree.leaves(state.opt_state):
        assert leaf.sharding.spec == (spec if leaf.ndim else PartitionSpec())
    assert optax.tree.norm(state.params) == optax.tree.norm(params)


def test_bad_options_are_refused():
    for options in (
        {"learning_rate": -1.0},
        {"warmup_steps": -1},
        {"decay_steps": 0},
        {"decay_to": 2.0},
        {"decay_shape": "step"},
    ):
        with pytest.raises(UserError, match=next(iter(options))):
            adamw(**options)
