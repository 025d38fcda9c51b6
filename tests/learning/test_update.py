"""The update on a toy language model: gradients against a plain loop, exact accumulation, exact skipping."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cipo_jax.learning.aggregation import AGGREGATIONS
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.gspo import GspoObjective
from cipo_jax.learning.microbatch import split_microbatches
from cipo_jax.learning.objective import ClippedObjective, SupervisedObjective
from cipo_jax.learning.state import Optimizer, TrainState, adamw
from cipo_jax.learning.update import make_update

VOCAB, WIDTH, ROWS, LENGTH = 7, 4, 6, 8


def toy_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32),
    }


def toy_logprob(params, tokens, length, active, temperature=1.0):
    """A causal model: the mean of the embeddings so far, then a linear layer."""
    x = jnp.cumsum(params["embed"][tokens], axis=1) / jnp.arange(1.0, tokens.shape[1] + 1)[None, :, None]
    logp = jax.nn.log_softmax(jnp.tanh(x) @ params["head"] / temperature)
    shifted = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)[:, :-1]
    pad = ((0, 0), (1, 0))
    return jnp.pad(shifted, pad), jnp.pad(entropy, pad)


def toy_batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    length = rng.integers(4, LENGTH + 1, rows).astype(np.int32)
    mask = (rng.random((rows, LENGTH)) < 0.8) & (np.arange(LENGTH) < length[:, None]) & (np.arange(LENGTH) > 0)
    mask[0] = False
    tokens = rng.integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)
    near = np.asarray(toy_logprob(toy_params(), tokens, length, None)[0])
    return UpdateBatch(
        tokens=tokens,
        action_mask=mask,
        turn=np.zeros((rows, LENGTH), np.int8),
        length=length,
        group=np.arange(rows, dtype=np.int32) // 2,
        advantage=np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32),
        old_logprob=(near + rng.normal(size=mask.shape) * 0.3).astype(np.float32),
        ref_logprob=(near + rng.normal(size=mask.shape) * 0.3).astype(np.float32),
    )


# Parameters move by exactly minus the gradient.
GRADIENT_DESCENT = Optimizer(optax.identity(), learning_rate=1.0, max_grad_norm=None)
ADAMW = adamw(learning_rate=0.1, weight_decay=0.5)


@functools.cache
def compiled(objective, optimizer):
    """One program for all tests that ask for the same."""
    return make_update(toy_logprob, objective, optimizer)


def run(objective, batch, microbatches, optimizer=GRADIENT_DESCENT, rate=1.0):
    update = compiled(objective, optimizer)
    return update(optimizer.init(toy_params()), split_microbatches(batch, microbatches), np.float32(rate))


def plain_loss(params, objective, batch):
    """The whole minibatch's loss, token by token, unfused."""
    per_row, tokens, live = [], 0, 0
    for i in range(len(batch.tokens)):
        hidden, row = jnp.zeros(WIDTH), []
        for j in range(LENGTH):
            if batch.action_mask[i, j]:
                logits = jnp.tanh(hidden / j) @ params["head"]
                p = jnp.exp(logits) / jnp.exp(logits).sum()
                logp = jnp.log(p[batch.tokens[i, j]])
                ratio, a = jnp.exp(logp - batch.old_logprob[i, j]), batch.advantage[i, j]
                loss = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
                d = batch.ref_logprob[i, j] - logp
                loss += objective.kl_weight * (jnp.exp(d) - d - 1)
                loss += objective.entropy_weight * (p * jnp.log(p)).sum()
                row.append(loss)
            hidden = hidden + params["embed"][batch.tokens[i, j]]
        tokens, live = tokens + len(row), live + bool(row)
        if row:
            total = sum(row)
            per_row.append(total / len(row) if objective.aggregation == "seq_mean_token_mean" else total)
    return sum(per_row) / (tokens if objective.aggregation == "token_mean" else live)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_gradient_equals_the_plain_loss(aggregation):
    objective = ClippedObjective(kl_weight=0.2, entropy_weight=0.1, aggregation=aggregation)
    batch = toy_batch()
    state, metrics = run(objective, batch, microbatches=4)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: plain_loss(p, objective, batch)))(toy_params())
    got = jax.tree.map(lambda before, after: before - after, toy_params(), state.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, grads)
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    assert 0.0 < float(metrics["clip_fraction"]) < 1.0


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [(ClippedObjective, name) for name in AGGREGATIONS] + [(GspoObjective, "seq_mean_token_mean")],
)
def test_accumulation_does_not_change_the_update(kind, aggregation):
    objective = kind(aggregation=aggregation, token_norm=20.0, kl_weight=0.1, clip_low=0.1, clip_high=0.1)
    (one, one_metrics), (four, four_metrics) = (run(objective, toy_batch(), m) for m in (1, 4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), one.params, four.params)
    for name, value in one_metrics.items():
        np.testing.assert_allclose(four_metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def spoil(field, value=np.nan):
    batch = toy_batch()
    i, j = np.argwhere(batch.action_mask)[3]
    getattr(batch, field)[i, j] = value
    return batch


@pytest.mark.parametrize("field", ["old_logprob", "advantage", "ref_logprob"])
def test_one_nan_skips_the_update_exactly(field):
    update = compiled(ClippedObjective(kl_weight=0.1), ADAMW)
    state, _ = update(ADAMW.init(toy_params()), split_microbatches(toy_batch(), 2), np.float32(0.1))
    before = jax.tree.map(np.array, state)
    state, metrics = update(state, split_microbatches(spoil(field), 2), np.float32(0.1))
    assert metrics["skipped"] == 1.0 and metrics["update_norm"] == 0.0 and np.isnan(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, before.opt_state)
    assert int(state.step) == int(before.step) + 1 == 2
    # The run goes on as if the bad batch had not been there.
    after, metrics = update(state, split_microbatches(toy_batch(1), 2), np.float32(0.1))
    plain = TrainState(jax.tree.map(jnp.array, before.params), jax.tree.map(jnp.array, before.opt_state), jnp.int32(1))
    straight, _ = update(plain, split_microbatches(toy_batch(1), 2), np.float32(0.1))
    assert metrics["skipped"] == 0.0
    jax.tree.map(np.testing.assert_array_equal, after.params, straight.params)


def test_a_nan_off_action_tokens_changes_nothing():
    batch = toy_batch()
    dirty = toy_batch()
    for field in ("old_logprob", "ref_logprob", "advantage"):
        getattr(dirty, field)[~batch.action_mask] = np.nan
    (clean_state, _), (dirty_state, metrics) = (run(ClippedObjective(), b, 2) for b in (batch, dirty))
    assert metrics["skipped"] == 0.0
    jax.tree.map(np.testing.assert_array_equal, clean_state.params, dirty_state.params)


def test_nothing_in_the_loss_leaves_the_state():
    batch = toy_batch()
    batch.action_mask[:] = False
    state, metrics = run(ClippedObjective(kl_weight=0.1), batch, 2, ADAMW)
    assert (metrics["empty"], metrics["skipped"], metrics["loss"], metrics["loss_count"]) == (1.0, 0.0, 0.0, 0.0)
    jax.tree.map(np.testing.assert_array_equal, state.params, toy_params())


def test_padding_rows_and_columns_change_nothing():
    batch = toy_batch()
    wide = batch.map(lambda x: np.pad(x, ((0, 2), (0, 3))) if x.ndim == 2 else np.pad(x, (0, 2)))
    (state, _), (padded, _) = (run(ClippedObjective(kl_weight=0.1), b, 1) for b in (batch, wide))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), state.params, padded.params)


def test_gradient_clip_and_update_norm():
    free, tight = GRADIENT_DESCENT, Optimizer(optax.identity(), 1.0, max_grad_norm=1e-3)
    (_, metrics), (_, clipped) = (run(ClippedObjective(), toy_batch(), 2, o, rate=0.5) for o in (free, tight))
    assert float(metrics["update_norm"]) == pytest.approx(0.5 * float(metrics["grad_norm"]), rel=1e-5)
    assert float(clipped["update_norm"]) == pytest.approx(0.5e-3, rel=1e-5)
    assert float(clipped["grad_norm"]) == float(metrics["grad_norm"])
    assert float(metrics["param_norm"]) == pytest.approx(float(optax.tree.norm(toy_params())), rel=1e-6)


def test_a_new_rate_or_temperature_compiles_nothing():
    optimizer = adamw()
    update = make_update(toy_logprob, ClippedObjective(), optimizer)
    state, batch = optimizer.init(toy_params()), split_microbatches(toy_batch(), 2)
    for rate, temperature in ((1e-6, 1.0), (2e-6, 0.7)):
        state, metrics = update(state, batch, np.float32(rate), np.float32(temperature))
        assert float(metrics["learning_rate"]) == np.float32(rate)
    assert update._cache_size() == 1


def test_the_state_is_donated_and_the_batch_is_not():
    update = compiled(ClippedObjective(kl_weight=0.1), ADAMW)
    state, batch = ADAMW.init(toy_params()), jax.device_put(split_microbatches(toy_batch(), 2))
    update(state, batch, np.float32(1e-6))
    assert state.params["head"].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


def test_bfloat16_parameters_accumulate_in_float32():
    optimizer = adamw(learning_rate=1e-2)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), toy_params())
    update = make_update(toy_logprob, ClippedObjective(), optimizer)
    state, metrics = update(optimizer.init(params), split_microbatches(toy_batch(), 3), np.float32(1e-2))
    assert state.params["head"].dtype == jnp.bfloat16 and metrics["grad_norm"].dtype == jnp.float32
    assert float(metrics["update_norm"]) > 0 and metrics["skipped"] == 0.0


def test_supervised_updates_fit_a_sequence():
    optimizer = adamw(learning_rate=0.1, weight_decay=0.0)
    batch = toy_batch(rows=2)
    batch.tokens[:] = [0, 1, 2, 3, 4, 5, 6, 0]
    batch.action_mask[:] = np.arange(LENGTH) > 2
    update = make_update(toy_logprob, SupervisedObjective(), optimizer)
    state, micro = optimizer.init(toy_params()), split_microbatches(batch, 2)
    losses = []
    for _ in range(150):
        state, metrics = update(state, micro, optimizer.rate(0))
        losses.append(float(metrics["loss"]))
    assert losses[0] > math.log(VOCAB) / 2 and losses[-1] < 0.1


def test_rewarded_tokens_become_likelier():
    batch = toy_batch()
    batch.old_logprob = None
    batch.advantage = np.where(batch.tokens == 3, np.float32(1), np.float32(-1))
    optimizer = adamw(learning_rate=0.02)
    update = make_update(toy_logprob, ClippedObjective(kl_weight=0.0), optimizer)
    state, micro = optimizer.init(toy_params()), split_microbatches(batch, 2)
    good, bad = batch.action_mask & (batch.tokens == 3), batch.action_mask & (batch.tokens != 3)
    before = np.asarray(toy_logprob(state.params, batch.tokens, batch.length, None)[0])
    for _ in range(10):
        state, _ = update(state, micro, np.float32(0.02))
    after = np.asarray(toy_logprob(state.params, batch.tokens, batch.length, None)[0])
    assert (after - before)[good].mean() > 0.1 > -0.1 > (after - before)[bad].mean()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (simulated) devices")
def test_sharded_update_equals_the_unsharded_one():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    params, objective, optimizer = toy_params(), ClippedObjective(kl_weight=0.1), adamw(learning_rate=0.05)
    batch = split_microbatches(toy_batch(rows=8), 2, shards=2)
    expected, expected_metrics = make_update(toy_logprob, objective, optimizer)(
        optimizer.init(params), batch, np.float32(0.05)
    )
    spec = {"embed": PartitionSpec(None, "fsdp"), "head": PartitionSpec("fsdp")}
    sharding = optimizer.state_sharding(params, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))
    state = jax.jit(optimizer.init, out_shardings=sharding)(toy_params())
    placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    update = make_update(toy_logprob, objective, optimizer, state_sharding=sharding)
    for _ in range(2):
        before = jax.tree.map(lambda x: x.sharding, state)
        state, metrics = update(state, placed, np.float32(0.05))
        assert jax.tree.map(lambda x: x.sharding, state) == before
        if int(state.step) == 1:
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state.params, expected.params)
            for name, value in expected_metrics.items():
                np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert update._cache_size() == 1
