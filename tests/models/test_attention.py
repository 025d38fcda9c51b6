"""Blockwise attention equals plain masked softmax, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cipo_jax.models.attention import PackedContext, Visibility, visible


def random_visibility(rng, B, L):
    """Rows with two documents, copies behind them and padding at the end."""
    segment, index = np.zeros((B, L), np.int32), np.tile(np.arange(L, dtype=np.int32), (B, 1))
    start, limit = np.zeros((B, L), np.int32), index + 1
    hole = np.zeros((2, B, L), np.int32)
    for b in range(B):
        text = int(rng.integers(L // 2, L - L // 4))
        border = int(rng.integers(1, text))
        start[b, border:text] = border
        at, seg = text, 1
        while at < L - 2:
            n = int(rng.integers(1, L - at))
            origin = int(rng.integers(border + 1, text))
            segment[b, at : at + n] = seg
            index[b, at : at + n] = origin + np.arange(n)
            start[b, at : at + n], limit[b, at : at + n] = border, rng.integers(border, origin)
            at, seg = at + n, seg + 1
        segment[b, at:], limit[b, at:], start[b, at:] = -1, 0, 0
        a = int(rng.integers(0, text))
        hole[0, b, a:text], hole[1, b, a:text] = a // 2, a // 2 + 3
    return Visibility(*(jnp.asarray(x) for x in (segment, index, start, limit, hole[0], hole[1])))


def plain(q, k, v, mask):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(mask[:, None], s, -1e30), -1)
    p = jnp.where(mask.any(-1)[:, None, :, None], p, 0)
    return jnp.einsum("bhqk,bkhe->bqhe", p, v)


@pytest.mark.parametrize("length,block", [(1, 16), (37, 16), (64, 16), (50, 64)])
def test_attention_equals_masked_softmax_with_gradients(length, block):
    rng = np.random.default_rng(length)
    B, H, K, E = 3, 6, 2, 8
    q, k, v, g = (jnp.asarray(rng.normal(size=(B, length, n, E)), jnp.float32) for n in (H, K, K, H))
    vis = random_visibility(rng, B, length) if length > 8 else Visibility.causal(jnp.ones((B, length), bool))
    mask = visible(vis, vis)

    def fast(q, k, v):
        return (PackedContext(vis, block).attention(q, k, v, None, 0)[0] * g).sum()

    def slow(q, k, v):
        return (plain(q, k, v, mask) * g).sum()

    out, grads = jax.value_and_grad(fast, (0, 1, 2))(q, k, v)
    want, want_grads = jax.value_and_grad(slow, (0, 1, 2))(q, k, v)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
    for a, b in zip(grads, want_grads):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_padding_sees_and_is_seen_by_nothing():
    vis = Visibility.causal(jnp.asarray([[True, True, False, False]]))
    mask = np.asarray(visible(vis, vis))[0]
    assert mask.tolist() == [[True, False, False, False], [True, True, False, False], [False] * 4, [False] * 4]


def test_documents_in_one_row_are_isolated():
    vis = Visibility.causal(jnp.ones((1, 5), bool), jnp.asarray([[0, 0, 2, 2, 2]]))
    mask = np.asarray(visible(vis, vis))[0]
    assert mask[3].tolist() == [False, False, True, True, False]
