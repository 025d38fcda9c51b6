"""Log-probabilities of given tokens without a `[B, L, V]` array.

Rows are sorted so that the positions that are asked for come first, then taken a few columns at a time; columns that
nobody asked for are never projected. The backward pass recomputes each column block's logits. On a mesh the projection is
gathered once, and every data shard adds up its own part of its gradient until the last block: a collective per block
would take longer than the block.
"""

import functools

import jax
import jax.numpy as jnp

from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import ShardingRules

TOKENS_PER_BLOCK = 256  # on each data shard
BACKWARD_BLOCKS = 8  # the backward pass takes so many at once: each of its steps adds to a whole `[V, D]` gradient

LOGIT_BYTES = 2**30  # a device of a mesh keeps several arrays of this size in a step of the backward pass


def columns_of(rows: int, length: int, shards: int = 1) -> int:
    """Columns in a block of `rows` rows on `shards` data shards."""
    return max(1, min(length, TOKENS_PER_BLOCK * shards // rows))


def _wide(x):
    """The dtype of logits and of all sums over them: float32, or wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _block(hidden_BLD, weight_VD, target_BL, temperature, at, columns):
    """Logits / temperature, their log-sum-exp and the targets of columns `[at, at + columns)`."""
    h = jax.lax.dynamic_slice_in_dim(hidden_BLD, at, columns, 1)
    t = jax.lax.dynamic_slice_in_dim(target_BL, at, columns, 1)
    z = jnp.einsum("bcd,vd->bcv", h, weight_VD.astype(h.dtype), preferred_element_type=_wide(h)) / temperature
    return h, t, z, jax.nn.logsumexp(z, -1)


def _shards(rows: int, rules: ShardingRules | None) -> int:
    """Data shards that the rows are split over."""
    shards = 1 if rules is None else data_shards(rules.mesh)
    return shards if rows % shards == 0 else 1


def _together(columns: int, rows: int, places: int, vocabulary: int, rules: ShardingRules | None) -> int:
    """Blocks that a step of the backward pass takes; on a mesh no more than `LOGIT_BYTES` hold."""
    together = min(BACKWARD_BLOCKS, places // columns)
    if rules is None or rules.mesh.size == 1:
        return together
    shards = _shards(rows, rules) * rules.mesh.shape["tensor"]
    return max(1, min(together, LOGIT_BYTES * shards // (4 * columns * rows * vocabulary)))


def _gathered(weight_VD, dtype, rules: ShardingRules | None):
    """The projection in the dtype of its products, on every data shard."""
    weight = weight_VD.astype(dtype)
    return weight if rules is None else rules.constrain(weight, ("vocab", None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _sorted_logprobs(hidden, weight, target, blocks, temperature, columns, rules):
    return _sorted_forward(hidden, weight, target, blocks, temperature, columns, rules)[0]


def _sorted_forward(hidden, weight, target, blocks, temperature, columns, rules):
    residuals = hidden, weight, target, blocks, temperature
    weight = _gathered(weight, hidden.dtype, rules)

    def body(i, out):
        _, t, z, lse = _block(hidden, weight, target, temperature, i * columns, columns)
        logprob = jnp.take_along_axis(z, t[..., None], -1)[..., 0] - lse
        entropy = lse - (jnp.exp(z - lse[..., None]) * z).sum(-1)
        return tuple(jax.lax.dynamic_update_slice_in_dim(o, x, i * columns, 1) for o, x in zip(out, (logprob, entropy)))

    zero = jnp.zeros(target.shape, _wide(hidden))
    return jax.lax.fori_loop(0, blocks, body, (zero, zero)), residuals


def _sorted_backward(columns, rules, residuals, cotangents):
    hidden, stored, target, blocks, temperature = residuals
    weight = _gathered(stored, hidden.dtype, rules)
    g_logprob, g_entropy = cotangents
    shards = _shards(len(hidden), rules)
    together = _together(columns, *target.shape, stored.shape[0], rules)
    columns, blocks = together * columns, -(-blocks // together)

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
        flat, h_flat = d_z.reshape(-1, z.shape[-1]), h.reshape(-1, h.shape[-1]).astype(z.dtype)
        d_h = (flat @ weight.astype(z.dtype)).reshape(h.shape).astype(hidden.dtype)
        if shards == 1:
            d_weight = d_weight + flat.T @ h_flat
        else:
            split = (x.reshape(shards, -1, x.shape[-1]) for x in (flat, h_flat))
            d_weight = d_weight + jnp.einsum("snv,snd->svd", *split)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h, i * columns, 1), d_weight

    if shards == 1:
        start = jnp.zeros(stored.shape, _wide(hidden))
    else:
        start = rules.constrain(jnp.zeros((shards, *stored.shape), _wide(hidden)), ("batch", "vocab", None))
    d_hidden, d_weight = jax.lax.fori_loop(0, blocks, body, (jnp.zeros_like(hidden), start))
    d_weight = d_weight if shards == 1 else d_weight.sum(0)
    return d_hidden, d_weight.astype(stored.dtype), None, None, None


_sorted_logprobs.defvjp(_sorted_forward, _sorted_backward)


def token_logprobs(hidden_BLD, weight_VD, target_BL, active_BL, temperature=1.0, rules: ShardingRules | None = None):
    """Log-probs and entropies (nats, float32) of `target_BL` where `active_BL`, 0 elsewhere.

    Args:
      hidden_BLD: hidden state of the row that reads each target (the token before it).
      weight_VD: output projection.
      target_BL: int32 ids.
      active_BL: bool; the cost is that of the row with the most active positions.
      temperature: logits are divided by it, a traced scalar.
      rules: sharding table of the rows and the projection; None on one device.

    Returns:
      `(logprob, entropy)`, each `[B, L]`. Both carry gradients to `hidden_BLD` and `weight_VD`.
    """
    B, L = target_BL.shape
    columns = columns_of(B, L, _shards(B, rules))
    order = jnp.argsort(~active_BL, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    hidden = jnp.take_along_axis(hidden_BLD, order[..., None], 1)
    target = jnp.take_along_axis(target_BL, order, 1)
    padding = -L % (columns * min(BACKWARD_BLOCKS, -(-L // columns)))
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    target = jnp.pad(target, ((0, 0), (0, padding)))
    blocks = -(-jnp.max(active_BL.sum(1)) // columns)
    temperature = jnp.asarray(temperature, _wide(hidden))
    with jax.named_scope("logprobs"):
        out = _sorted_logprobs(hidden, weight_VD, target, blocks, temperature, columns, rules)
    return tuple(jnp.where(active_BL, jnp.take_along_axis(x[:, :L], back, 1), 0.0) for x in out)
