"""Blockwise attention over packed rows: what a query sees is a predicate on a few integers per token.

No `[L, L]` array is ever formed beyond one `block x block` tile, and tiles that nothing can see are skipped. A key `k` is
visible to a query `q` iff

    (segment_k == 0 and start_q <= index_k < limit_q and not hole_start_q <= index_k < hole_end_q)
    or (segment_k == segment_q > 0 and index_k <= index_q)

Segment 0 holds trajectories, positive segments hold copies of a trajectory's later tokens that must not see a part of
it, and segment -1 is padding, which sees and is seen by nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from cipo_jax.models.packed_delta import packed_delta

NEGATIVE = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Visibility:
    """Per-token integers `[B, L]` int32 of the predicate above.

    Attributes:
      segment: 0 trajectory, > 0 copy, -1 padding.
      index: place of the token in its row (a copy keeps its original's).
      start: first trajectory index the token may see: its document's first.
      limit: one past the last trajectory index the token may see.
      hole_start, hole_end: a further hidden stretch `[hole_start, hole_end)`; empty where equal.
    """

    segment: jax.Array
    index: jax.Array
    start: jax.Array
    limit: jax.Array
    hole_start: jax.Array
    hole_end: jax.Array

    @classmethod
    def causal(cls, mask_BL, start_BL=None) -> "Visibility":
        """Plain causal rows: `mask_BL` is True on real tokens; `start_BL` is each token's document's first index."""
        index = jnp.broadcast_to(jnp.arange(mask_BL.shape[1], dtype=jnp.int32)[None], mask_BL.shape)
        zero = jnp.zeros_like(index)
        start = zero if start_BL is None else start_BL
        return cls(jnp.where(mask_BL, 0, -1), index, start, jnp.where(mask_BL, index + 1, 0), zero, zero)

    def concatenate(self, other: "Visibility") -> "Visibility":
        """Both token streams behind each other in every row."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), self, other)


def visible(query: Visibility, key: Visibility) -> jax.Array:
    """The predicate, `[..., Lq, Lk]` bool: one tile in here, the whole matrix in the tests' reference."""

    def q(x):
        return x[..., :, None]

    def k(x):
        return x[..., None, :]

    index = k(key.index)
    in_hole = (q(query.hole_start) <= index) & (index < q(query.hole_end))
    trajectory = (k(key.segment) == 0) & (q(query.start) <= index) & (index < q(query.limit)) & ~in_hole
    own = (k(key.segment) == q(query.segment)) & (k(key.segment) > 0) & (index <= q(query.index))
    return trajectory | own


def _tiles(x, block: int, axis: int):
    """Splits `axis` into tiles and moves the tile number to the front."""
    shape = (*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _tile_list(query: Visibility, key: Visibility, block: int) -> tuple[jax.Array, jax.Array]:
    """For every tile of queries the tiles of keys that some query in it can see: `[nq, nk]` numbers, and how many count.

    Conservative. Made once per forward, outside the layers, so that skipping costs no reduction over the mesh per layer.
    """
    big = jnp.int32(2**30)
    q, k = (jax.tree.map(lambda x: _tiles(x, block, 1), v) for v in (query, key))

    def low(x, where):
        return jnp.min(jnp.where(where, x, big), (1, 2))

    def high(x, where):
        return jnp.max(jnp.where(where, x, -big), (1, 2))

    real, text, copied, copy = q.segment >= 0, k.segment == 0, q.segment > 0, k.segment > 0
    trajectory = (low(q.start, real)[:, None] <= high(k.index, text)[None]) & (
        low(k.index, text)[None] < high(q.limit, real)[:, None]
    )
    own = (low(q.segment, copied)[:, None] <= high(k.segment, copy)[None]) & (
        low(k.segment, copy)[None] <= high(q.segment, copied)[:, None]
    )
    seen = trajectory | own
    return jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32), seen.sum(1, dtype=jnp.int32)


def _tile(tiles, number):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tiles)


def _rows(x_BKGQN):
    """`[B, K, G Q, N]`: with queries of one key head in one dimension every product is a plain batched matmul."""
    B, K, G, Q, N = x_BKGQN.shape
    return x_BKGQN.reshape(B, K, G * Q, N)


def _wide(x):
    """The dtype to add up in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _scores(q_BKGQE, k_BKSE, mask_BQS):
    s = jnp.einsum("bkre,bkse->bkrs", _rows(q_BKGQE), k_BKSE, preferred_element_type=_wide(q_BKGQE))
    return jnp.where(mask_BQS[:, None, None], s.reshape(*q_BKGQE.shape[:4], -1), NEGATIVE)


def _forward(q_tiles, k_tiles, v_tiles, query_tiles, key_tiles, seen):
    """Online-softmax attention over tiles: outputs `[nq, B, K, G, block, E]` and log-sum-exps `[nq, B, K, G, block]`."""

    wide = _wide(q_tiles)

    def query_step(_, xs):
        q, query, (order, count) = xs

        def key_step(n, carry):
            m, total, acc = carry
            k, v, key = _tile((k_tiles, v_tiles, key_tiles), order[n])
            s = _scores(q, k, visible(query, key))
            m_new = jnp.maximum(m, s.max(-1))
            p = jnp.exp(s - m_new[..., None])
            shrink = jnp.exp(m - m_new)
            pv = jnp.einsum("bkrs,bkse->bkre", _rows(p).astype(v.dtype), v, preferred_element_type=_wide(v))
            return m_new, total * shrink + p.sum(-1), acc * shrink[..., None] + pv.reshape(acc.shape)

        # The maximum starts above a hidden score, so that a row that sees nothing adds up zeros.
        start = (jnp.full(q.shape[:-1], 0.1 * NEGATIVE, wide), jnp.zeros(q.shape[:-1], wide), jnp.zeros(q.shape, wide))
        m, total, acc = jax.lax.fori_loop(0, count, key_step, start)
        total = jnp.maximum(total, 1e-30)  # a padding row sees nothing: its output is 0
        return None, (acc / total[..., None], m + jnp.log(total))

    return jax.lax.scan(query_step, None, (q_tiles, query_tiles, seen))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q_BKGLE, k_BKSE, v_BKSE, query, key, seen, block: int):
    return _attend_forward(q_BKGLE, k_BKSE, v_BKSE, query, key, seen, block)[0]


def _untile(x, axis: int):
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _all_tiles(q, k, v, query, key, block):
    return (
        _tiles(q, block, 3),
        _tiles(k, block, 2),
        _tiles(v, block, 2),
        jax.tree.map(lambda x: _tiles(x, block, 1), query),
        jax.tree.map(lambda x: _tiles(x, block, 1), key),
    )


def _attend_forward(q, k, v, query, key, seen, block):
    out, lse = _forward(*_all_tiles(q, k, v, query, key, block), seen)
    out = _untile(out, 3).astype(v.dtype)
    return out, (q, k, v, query, key, seen, out, lse)


def _attend_backward(block, residuals, d_out):
    q, k, v, query, key, seen, out, lse_tiles = residuals
    q_tiles, k_tiles, v_tiles, query_tiles, key_tiles = _all_tiles(q, k, v, query, key, block)
    wide = _wide(q)
    d_tiles = _tiles(d_out.astype(wide), block, 3)
    delta_tiles = _tiles((d_out.astype(wide) * out.astype(wide)).sum(-1), block, 3)

    def query_step(carry, xs):
        q, query, (order, count), lse, d, delta = xs

        def key_step(n, carry):
            d_q, d_k, d_v = carry
            k, v, key = _tile((k_tiles, v_tiles, key_tiles), order[n])
            mask = visible(query, key)
            p = jnp.where(mask[:, None, None], jnp.exp(_scores(q, k, mask) - lse[..., None]), 0.0)
            d_p = jnp.einsum("bkre,bkse->bkrs", _rows(d), v.astype(wide))
            d_s = _rows(p) * (d_p - _rows(delta[..., None]))
            d_q = d_q + jnp.einsum("bkrs,bkse->bkre", d_s, k.astype(wide)).reshape(d_q.shape)
            own_k = _tile(d_k, order[n]) + jnp.einsum("bkrs,bkre->bkse", d_s, _rows(q).astype(wide))
            own_v = _tile(d_v, order[n]) + jnp.einsum("bkrs,bkre->bkse", _rows(p), _rows(d))
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=order[n], axis=0)
            return d_q, put(d_k, own_k), put(d_v, own_v)

        d_q, *carry = jax.lax.fori_loop(0, count, key_step, (jnp.zeros(q.shape, wide), *carry))
        return tuple(carry), d_q

    start = (jnp.zeros(k_tiles.shape, wide), jnp.zeros(v_tiles.shape, wide))
    (d_k, d_v), d_q = jax.lax.scan(query_step, start, (q_tiles, query_tiles, seen, lse_tiles, d_tiles, delta_tiles))
    return (
        _untile(d_q, 3).astype(q.dtype),
        _untile(d_k, 2).astype(k.dtype),
        _untile(d_v, 2).astype(v.dtype),
        None,
        None,
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


class PackedContext:
    """Mixing of whole rows with themselves under a `Visibility`; no cache."""

    def __init__(self, visibility: Visibility, block: int = 256, trajectory: int | None = None):
        """Mixes rows of `L` tokens.

        Args:
          visibility: what each token sees, `[B, L]`.
          block: the side of an attention tile; rows are padded to a multiple of it.
          trajectory: how many of a row's places, from its start, hold the trajectory; copies follow. All of them if None.
            Only delta layers need to know (see `packed_delta`).
        """
        length = visibility.index.shape[1]
        self.rows, self.trajectory = visibility, length if trajectory is None else trajectory
        self.block = min(block, length)
        self.padding = -length % self.block
        pad = {"segment": -1}
        self.visibility = Visibility(
            **{
                f.name: jnp.pad(
                    getattr(visibility, f.name), ((0, 0), (0, self.padding)), constant_values=pad.get(f.name, 0)
                )
                for f in dataclasses.fields(Visibility)
            }
        )
        self.seen = _tile_list(self.visibility, self.visibility, self.block)

    def attention(self, q_BLHE, k_BLKE, v_BLKE, cache, layer):
        """See `models.decoder.Context`."""
        del layer
        B, L, H, E = q_BLHE.shape
        K = k_BLKE.shape[2]

        def rows(x):
            return jnp.pad(x, ((0, 0), (0, self.padding), (0, 0), (0, 0)))

        q = rows(q_BLHE * jnp.asarray(E**-0.5, q_BLHE.dtype)).reshape(B, -1, K, H // K, E).transpose(0, 2, 3, 1, 4)
        k, v = rows(k_BLKE).transpose(0, 2, 1, 3), rows(v_BLKE).transpose(0, 2, 1, 3)
        out = _attend(q, k, v, self.visibility, self.visibility, self.seen, self.block)
        return out.transpose(0, 3, 1, 2, 4).reshape(B, -1, H, E)[:, :L], cache

    def delta(self, inputs, cache, layer):
        """See `models.decoder.Context`."""
        del layer
        return packed_delta(inputs, self.rows, self.trajectory), cache
