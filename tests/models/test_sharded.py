"""Eight simulated devices compute what one does, and each holds its share."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import GENERATION_RULES, ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, init_decoder, parameter_count, parameter_shardings, reshard

# Float64: with the rounding that a different order of addition brings out of the way, equal means equal.
WIDE = dict(dtype="float64", param_dtype="float64")
PLAIN = DecoderConfig(
    **WIDE, vocab_size=512, width=64, depth=3, heads=8, kv_heads=2, head_dim=16, ffn=512, qkv_bias=True
)
HYBRID = DecoderConfig(
    **WIDE,
    vocab_size=512,
    width=64,
    depth=2,
    heads=8,
    kv_heads=2,
    head_dim=16,
    ffn=512,
    tied=False,
    period=("delta", "attention"),
    rotary=0.25,
    gated=True,
    zero_centred=True,
    delta_key_heads=4,
    delta_value_heads=8,
    delta_key_dim=16,
    delta_value_dim=8,
)
MESHES = {"fsdp4_tensor2": dict(fsdp=4, tensor=2), "fsdp2_tensor4": dict(fsdp=2, tensor=4)}
TOKENS = np.random.default_rng(0).integers(0, 512, (8, 70))
LENGTHS = np.array([70, 3, 65, 64, 70, 1, 33, 70])


def logits_and_gradients(graph, params, rules):
    tokens, lengths = rules.put_batch((jnp.asarray(TOKENS, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)))

    @jax.jit
    def run(params, tokens, lengths):
        def loss(params):
            model = nnx.merge(graph, params)
            index = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32)[None], tokens.shape)
            real = index < lengths[:, None]
            logits = model.logits(model(tokens, index, PackedContext(Visibility.causal(real), 64))[0])
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], 2)[..., 0]
            return -jnp.where(real, picked, 0).sum() / real.sum(), jnp.where(real[..., None], logits, 0)

        return jax.grad(loss, has_aux=True)(params)

    return run(params, tokens, lengths)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=["plain", "hybrid"])
def single(request, float64):
    config = PLAIN if request.param == "plain" else HYBRID
    graph, params = init_decoder(config, 0, decoding.one_device())
    return config, params, logits_and_gradients(graph, params, decoding.one_device())


@pytest.fixture(scope="module")
def narrow(single):
    """In float32: `run(rules)` gives gradients and logits on a mesh; and what one device gives."""
    config, wide, _ = single
    config = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), jax.device_get(wide))

    def run(rules):
        graph, shapes = abstract_decoder(config, rules)
        grads, logits = logits_and_gradients(graph, jax.device_put(params, parameter_shardings(shapes, rules)), rules)
        assert logits.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
        return [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)], np.asarray(logits, np.float64)

    return run, run(decoding.one_device())


@pytest.mark.parametrize("shape", MESHES)
def test_logits_and_gradients_equal_one_device(single, shape):
    config, alone, (want_grads, want_logits) = single
    rules = ShardingRules(mesh(**MESHES[shape]))
    graph, params = init_decoder(config, 0, rules)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), params, alone)
    grads, logits = logits_and_gradients(graph, params, rules)
    assert np.abs(logits - np.asarray(want_logits)).max() <= 1e-9 * np.abs(want_logits).max()
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.linalg.norm(got - np.asarray(want)) <= 1e-9 * np.linalg.norm(want)

    held = [0] * 8
    for array in jax.tree.leaves(params):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.size
    share = parameter_count(params) / 8
    assert max(held) <= 1.15 * share
    assert min(held) >= 0.85 * share


@pytest.mark.parametrize("shape", MESHES)
def test_float32_equals_one_device_to_rounding(single, narrow, shape):
    """1e-5: the largest logit's error of the largest logit, the gradient's in the L2 norm, whole and by parameter.

    In float32 a hybrid on one device is itself 1.1e-5 (logits) and 1.9e-5 (largest gradient entries) away from float64:
    the delta rule's norm divides by outputs that are near 0 at a document's start. Eight devices are nearer to one than
    that, so what is left is rounding.
    """
    _, _, (exact_grads, exact_logits) = single
    run, (want_grads, want_logits) = narrow
    got_grads, got_logits = run(ShardingRules(mesh(**MESHES[shape])))
    assert np.abs(got_logits - want_logits).max() <= 1e-5 * np.abs(want_logits).max()
    errors = [np.linalg.norm(a - b) for a, b in zip(got_grads, want_grads, strict=True)]
    sizes = [np.linalg.norm(b) for b in want_grads]
    assert np.linalg.norm(errors) <= 1e-5 * np.linalg.norm(sizes)
    assert all(error <= 1.5e-5 * size for error, size in zip(errors, sizes))
    # and both are what float64 says, to the same rounding
    for grads, logits in ((want_grads, want_logits), (got_grads, got_logits)):
        assert np.abs(logits - np.asarray(exact_logits)).max() <= 3e-5 * np.abs(exact_logits).max()
        for got, want in zip(grads, jax.tree.leaves(exact_grads), strict=True):
            assert np.linalg.norm(got - np.asarray(want)) <= 3e-5 * np.linalg.norm(want)


def test_generation_table_decodes_the_same(single):
    config, _, (_, want) = single
    rules = ShardingRules(mesh(fsdp=2, tensor=4))
    graph, params = init_decoder(config, 0, rules)
    generation = ShardingRules(rules.mesh, GENERATION_RULES)
    params = reshard(params, generation)
    assert all(array.sharding.mesh == rules.mesh for array in jax.tree.leaves(params))
    assert params["layers"][0]["mlp"]["up"].get_value().sharding.spec == jax.P(None, None, "tensor")

    @jax.jit
    def prefill(params, tokens, lengths):
        model = nnx.merge(graph, params)
        context = CachedContext(jnp.zeros_like(lengths), lengths, 70, 72)
        cache = KVCache.zeros(config, len(lengths), 72, generation)
        return model.logits(model(tokens, context.positions, context, cache)[0])

    got = prefill(params, *rules.put_batch((jnp.asarray(TOKENS, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))))
    got = np.where((np.arange(70)[None] < LENGTHS[:, None])[..., None], got, 0)
    assert np.abs(got - np.asarray(want)).max() <= 1e-9 * np.abs(want).max()


def test_bf16_copy_keeps_float32_decay():
    rules = ShardingRules(mesh(fsdp=4, tensor=2))
    _, params = init_decoder(HYBRID, 0, rules)
    copy = reshard(params, ShardingRules(rules.mesh, GENERATION_RULES), jnp.bfloat16)
    mixer = copy["layers"][0]["mixer"]
    assert mixer["query"].get_value().dtype == jnp.bfloat16
    assert mixer["A_log"].get_value().dtype == jnp.float32


def test_what_does_not_divide_is_refused_naming_the_tensor():
    odd = dataclasses.replace(PLAIN, heads=6, kv_heads=6)
    with pytest.raises(UserError, match=r"layers\.0\.mixer\.\w+ has 6 along 'heads'.*4 devices"):
        init_decoder(odd, 0, ShardingRules(mesh(fsdp=2, tensor=4)))
