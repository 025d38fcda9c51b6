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


@pytest.fixture(scope="module")
def hybrid():
    """A hybrid's graph and parameters, three rows of tokens with their lengths, and their logits by whole forwards."""
    graph, params = init_decoder(HYBRID, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
    tokens, lengths = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 23)), jnp.int32), jnp.asarray([23, 9, 1])
    whole = jax.jit(lambda params, tokens, lengths: full(nnx.merge(graph, params), tokens, lengths))
    return graph, params, tokens, lengths, whole(params, tokens, lengths)


@pytest.mark.parametrize(
    "unroll,split,reads,read",
    [
        ("scanned", False, (8, 24), 24),
        ("unrolled", False, (), None),
        ("unstacked", True, (8, 24, 30), 24),
        ("unstacked", True, (8, 24), 99),
    ],
)
def test_ways_to_run_the_layers_agree(hybrid, unroll, split, reads, read):
    """Cached decoding in uneven chunks, against the whole forward; hybrid, so that both kinds of layers count right."""
    graph, params, tokens, lengths, want = hybrid

    @functools.partial(jax.jit, static_argnames="chunk")
    def step(params, tokens, cache, filled, count, chunk):
        model = nnx.merge(graph, params)
        context = CachedContext(filled, count, chunk, 30, read)
        how = {"scanned": False, "unrolled": True, "unstacked": model.unstacked()}[unroll]
        hidden, cache = model(tokens, context.positions, context, cache, unroll=how)
        return model.logits(hidden), cache

    cache = KVCache.zeros(HYBRID, 3, 30, split=split, reads=reads)
    filled, got, at = jnp.zeros(3, jnp.int32), [], 0
    for chunk in (7, 1, 1, 14):
        count = jnp.clip(lengths - at, 0, chunk)
        logits, cache = step(params, tokens[:, at : at + chunk], cache, filled, count, chunk)
        got.append(logits)
        filled, at = filled + count, at + chunk
    got = jnp.concatenate(got, 1)
    for row, n in enumerate([23, 9, 1]):
        np.testing.assert_allclose(got[row, :n], want[row, :n], atol=1e-4)


@pytest.mark.parametrize("split,reads", [(False, ()), (True, (5, 12))])
def test_places_behind_the_ones_read_are_written_and_kept(split, reads):
    """A row beyond `read` gets a meaningless output, but its tokens are cached; the others do as ever."""
    graph, params = init_decoder(CONFIG, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
    tokens, filled = jnp.asarray(np.random.default_rng(3).integers(0, 97, (3, 2)), jnp.int32), jnp.asarray([3, 0, 11])

    @functools.partial(jax.jit, static_argnums=0)
    def step(read):
        cache = KVCache.zeros(CONFIG, 3, 16, split=split, reads=reads)
        cache = jax.tree.map(lambda x: jnp.full_like(x, 0.5), cache)
        context = CachedContext(filled, jnp.asarray([2, 1, 2]), 2, 16, read)
        model = nnx.merge(graph, params)
        hidden, cache = model(tokens, context.positions, context, cache, unroll=split)
        values = jnp.concatenate([jnp.concatenate(part) for part in cache.value], 3)
        keys = jnp.concatenate([jnp.concatenate(part) for part in cache.key], 4)
        return hidden, keys.swapaxes(3, 4), values

    (whole, *want), (part, *got) = step(None), step(5)
    np.testing.assert_allclose(part[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(part[1, 0], whole[1, 0], atol=1e-5)
    for x, y in zip(got, want, strict=True):
        written = np.asarray(x != 0.5).all((0, 2, 4))
        assert [np.flatnonzero(row).tolist() for row in written] == [[3, 4], [0], [11, 12]]
        np.testing.assert_allclose(x[:, :2], y[:, :2], atol=1e-5)
        np.testing.assert_allclose(x[0], y[0], atol=1e-5)


@pytest.mark.parametrize("split", [False, True])
def test_a_row_moves_between_caches_cut_into_other_parts(split):
    mine = KVCache.zeros(HYBRID, 3, 20, split=split, reads=(4, 9))
    theirs = KVCache.zeros(HYBRID, 2, 13, split=split, reads=(8,))
    rng = np.random.default_rng(0)
    mine, theirs = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), (mine, theirs))
    got = jax.jit(KVCache.put_row)(mine, 2, theirs, 1)

    def whole(parts, axis):
        return np.concatenate([np.concatenate(stacks) for stacks in parts], axis)

    for name, axis in (("key", 4), ("value", 3)):
        before, new, after = (np.moveaxis(whole(getattr(c, name), axis), axis, 2) for c in (mine, theirs, got))
        assert (after[:, :2] == before[:, :2]).all()
        assert (after[:, 2, :13] == new[:, 1]).all()
        assert (after[:, 2, 13:] == before[:, 2, 13:]).all()
    for name in ("state", "history"):
        for x, y, z in zip(*(jax.tree.leaves(getattr(c, name)) for c in (mine, theirs, got)), strict=True):
            assert (z[:, :2] == x[:, :2]).all() and (z[:, 2] == y[:, 1]).all()


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
