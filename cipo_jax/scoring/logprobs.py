"""Log-probabilities of given tokens without a `[B, L, V]` array.

Rows are sorted so that the positions that are asked for come first, then taken a few columns at a time; columns that
nobody asked for are never projected. The backward pass recomputes each column block's logits.
"""

import functools

import jax
import jax.numpy as jnp

TOKENS_PER_BLOCK = 2048


def _wide(x):
    """The dtype of logits and of all sums over them: float32, or wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _block(hidden_BLD, weight_VD, target_BL, temperature, at, columns):
    """Logits / temperature, their log-sum-exp and the targets of columns `[at, at + columns)`."""
    h = jax.lax.dynamic_slice_in_dim(hidden_BLD, at, columns, 1)
    t = jax.lax.dynamic_slice_in_dim(target_BL, at, columns, 1)
    z = jnp.einsum("bcd,vd->bcv", h, weight_VD.astype(h.dtype), preferred_element_type=_wide(h)) / temperature
    return h, t, z, jax.nn.logsumexp(z, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sorted_logprobs(hidden, weight, target, blocks, temperature, columns):
    return _sorted_forward(hidden, weight, target, blocks, temperature, columns)[0]


def _sorted_forward(hidden, weight, target, blocks, temperature, columns):
    def body(i, out):
        _, t, z, lse = _block(hidden, weight, target, temperature, i * columns, columns)
        logprob = jnp.take_along_axis(z, t[..., None], -1)[..., 0] - lse
        entropy = lse - (jnp.exp(z - lse[..., None]) * z).sum(-1)
        return tuple(jax.lax.dynamic_update_slice_in_dim(o, x, i * columns, 1) for o, x in zip(out, (logprob, entropy)))

    zero = jnp.zeros(target.shape, _wide(hidden))
    out = jax.lax.fori_loop(0, blocks, body, (zero, zero))
    return out, (hidden, weight, target, blocks, temperature)


def _sorted_backward(columns, residuals, cotangents):
    hidden, weight, target, blocks, temperature = residuals
    g_logprob, g_entropy = cotangents

    def body(i, grads):
        d_hidden, d_weight = grads
        h, t, z, lse = _block(hidden, weight, target, temperature, i * columns, columns)
        logp = z - lse[..., None]
        p = jnp.exp(logp)
        entropy = -(p * logp).sum(-1, keepdims=True)
        g_l = jax.lax.dynamic_slice_in_dim(g_logprob, i * columns, columns, 1)[..., None]
        g_h = jax.lax.dynamic_slice_in_dim(g_entropy, i * columns, columns, 1)[..., None]
        hot = jax.nn.one_hot(t, z.shape[-1], dtype=z.dtype)
        d_z = (g_l * (hot - p) - g_h * p * (logp + entropy)) / temperature
        d_z, h_flat = d_z.reshape(-1, z.shape[-1]), h.reshape(-1, h.shape[-1]).astype(z.dtype)
        d_h = (d_z @ weight.astype(z.dtype)).reshape(h.shape).astype(hidden.dtype)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h, i * columns, 1), d_weight + d_z.T @ h_flat

    start = (jnp.zeros_like(hidden), jnp.zeros(weight.shape, _wide(hidden)))
    d_hidden, d_weight = jax.lax.fori_loop(0, blocks, body, start)
    return d_hidden, d_weight.astype(weight.dtype), None, None, None


_sorted_logprobs.defvjp(_sorted_forward, _sorted_backward)


def token_logprobs(hidden_BLD, weight_VD, target_BL, active_BL, temperature=1.0):
    """Log-probs and entropies (nats, float32) of `target_BL` where `active_BL`, 0 elsewhere.

    Args:
      hidden_BLD: hidden state of the row that reads each target (the token before it).
      weight_VD: output projection.
      target_BL: int32 ids.
      active_BL: bool; the cost is that of the row with the most active positions.
      temperature: logits are divided by it, a traced scalar.

    Returns:
      `(logprob, entropy)`, each `[B, L]`. Both carry gradients to `hidden_BLD` and `weight_VD`.
    """
    B, L = target_BL.shape
    columns = max(1, min(L, TOKENS_PER_BLOCK // B))
    order = jnp.argsort(~active_BL, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    hidden = jnp.take_along_axis(hidden_BLD, order[..., None], 1)
    target = jnp.take_along_axis(target_BL, order, 1)
    padding = -L % columns
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    target = jnp.pad(target, ((0, 0), (0, padding)))
    blocks = -(-jnp.max(active_BL.sum(1)) // columns)
    temperature = jnp.asarray(temperature, _wide(hidden))
    out = _sorted_logprobs(hidden, weight_VD, target, blocks, temperature, columns)
    return tuple(jnp.where(active_BL, jnp.take_along_axis(x[:, :L], back, 1), 0.0) for x in out)
