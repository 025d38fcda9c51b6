"""The decoder: cached decoding equals the full forward, causality, packing."""

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


@pytest.fixture(scope="module")
def model():
    return nnx.merge(*init_decoder(CONFIG, 0, ShardingRules(mesh(devices=jax.devices()[:1]))))


def full(model, tokens, lengths):
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return model.logits(model(tokens, positions, PackedContext(Visibility.causal(mask), 16))[0])


@pytest.mark.parametrize("chunks", [[23], [7, 16], [1] * 23, [5, 1, 1, 16]])
@pytest.mark.parametrize("unroll", [True, False])
def test_cached_decoding_equals_full_forward(model, chunks, unroll):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 23)), jnp.int32)
    lengths = jnp.asarray([23, 9, 1])
    want = full(model, tokens, lengths)
    cache, filled, got = KVCache.zeros(CONFIG, 3, 30), jnp.zeros(3, jnp.int32), []
    at = 0
    for chunk in chunks:
        count = jnp.clip(lengths - at, 0, chunk)
        context = CachedContext(filled, count, chunk, 30)
        hidden, cache = model(tokens[:, at : at + chunk], context.positions, context, cache, unroll=unroll)
        got.append(model.logits(hidden))
        filled, at = filled + count, at + chunk
    got = jnp.concatenate(got, 1)
    for row, n in enumerate([23, 9, 1]):
        np.testing.assert_allclose(got[row, :n], want[row, :n], atol=1e-4)


def test_logits_do_not_depend_on_later_tokens_or_padding(model):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 97, (2, 12)), jnp.int32)
    long = full(model, tokens, jnp.asarray([12, 12]))
    short = full(model, tokens[:, :5], jnp.asarray([5, 5]))
    np.testing.assert_allclose(long[:, :5], short, atol=1e-5)
    padded = full(model, tokens, jnp.asarray([5, 12]))
    np.testing.assert_allclose(padded[0, :5], short[0], atol=1e-5)
