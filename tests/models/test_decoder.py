"""The decoder: cached decoding equals the full forward, causality, packing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder

CONFIG = DecoderConfig(
    vocab_size=97, width=48, depth=3, heads=6, kv_heads=2, head_dim=16, ffn=80, qkv_bias=True, tied=False
)

HYBRID = dataclasses.replace(
    CONFIG,
    depth=6,
    period=("delta", "delta", "attention"),
    rotary=0.5,
    gated=True,
    zero_centred=True,
    delta_key_heads=3,
    delta_value_heads=6,
    delta_key_dim=8,
    delta_value_dim=16,
)


@pytest.fixture(scope="module")
def model():
    return nnx.merge(*init_decoder(CONFIG, 0, ShardingRules(mesh(devices=jax.devices()[:1]))))


def full(model, tokens, lengths):
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return model.logits(model(tokens, positions, PackedContext(Visibility.causal(mask), 16))[0])


@pytest.mark.parametrize("read", [None, 24, 99])
@pytest.mark.parametrize("unroll", ["scanned", "unrolled", "unstacked"])
def test_ways_to_run_the_layers_agree(unroll, read):
    """Cached decoding in uneven chunks, against the whole forward; hybrid, so that both kinds of layers count right."""
    graph, params = init_decoder(HYBRID, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
    model = nnx.merge(graph, params)
    tokens, lengths = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 23)), jnp.int32), jnp.asarray([23, 9, 1])
    want = full(model, tokens, lengths)

    @functools.partial(jax.jit, static_argnames="chunk")
    def step(params, tokens, cache, filled, count, chunk):
        model = nnx.merge(graph, params)
        context = CachedContext(filled, count, chunk, 30, read)
        how = {"scanned": False, "unrolled": True, "unstacked": model.unstacked()}[unroll]
        hidden, cache = model(tokens, context.positions, context, cache, unroll=how)
        return model.logits(hidden), cache

    cache, filled, got, at = KVCache.zeros(HYBRID, 3, 30), jnp.zeros(3, jnp.int32), [], 0
    for chunk in (7, 1, 1, 14):
        count = jnp.clip(lengths - at, 0, chunk)
        logits, cache = step(params, tokens[:, at : at + chunk], cache, filled, count, chunk)
        got.append(logits)
        filled, at = filled + count, at + chunk
    got = jnp.concatenate(got, 1)
    for row, n in enumerate([23, 9, 1]):
        np.testing.assert_allclose(got[row, :n], want[row, :n], atol=1e-4)


def test_places_behind_the_ones_read_are_written_and_kept():
    """A row beyond `read` gets a meaningless output, but its tokens are cached; the others do as ever."""
    graph, params = init_decoder(CONFIG, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
    tokens, filled = jnp.asarray(np.random.default_rng(3).integers(0, 97, (3, 2)), jnp.int32), jnp.asarray([3, 0, 12])

    @functools.partial(jax.jit, static_argnums=0)
    def step(read):
        cache = jax.tree.map(lambda x: jnp.full_like(x, 0.5), KVCache.zeros(CONFIG, 3, 16))
        context = CachedContext(filled, jnp.asarray([2, 1, 2]), 2, 16, read)
        hidden, cache = nnx.merge(graph, params)(tokens, context.positions, context, cache)
        return hidden, cache

    (whole, want), (part, got) = step(None), step(5)
    np.testing.assert_allclose(part[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(part[1, 0], whole[1, 0], atol=1e-5)
    written = np.asarray(got.key != 0.5).all((0, 2, 4))
    assert [np.flatnonzero(row).tolist() for row in written] == [[3, 4], [0], [12, 13]]
    np.testing.assert_allclose(got.key[:, :2], want.key[:, :2], atol=1e-5)
    np.testing.assert_allclose(got.key[0], want.key[0], atol=1e-5)


def test_remat_policies_give_the_same_gradients():
    tokens, lengths = jnp.asarray(np.random.default_rng(2).integers(0, 97, (2, 20)), jnp.int32), jnp.asarray([20, 11])
    grads = {}
    for policy in ("full", "dots", "none"):
        config = dataclasses.replace(CONFIG, remat=policy)
        graph, params = init_decoder(config, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
        grads[policy] = jax.jit(jax.grad(lambda p: full(nnx.merge(graph, p), tokens, lengths)[0, :11].sum()))(params)  # noqa: B023
    for policy in ("dots", "none"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), grads["full"], grads[policy])


def test_logits_do_not_depend_on_later_tokens_or_padding(model):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 12)), jnp.int32)
    long = full(model, tokens, jnp.asarray([12, 12]))
    short = full(model, tokens[:, :5], jnp.asarray([5, 5]))
    np.testing.assert_allclose(long[:, :5], short, atol=1e-5)
    padded = full(model, tokens, jnp.asarray([5, 12]))
    np.testing.assert_allclose(padded[0, :5], short[0], atol=1e-5)
