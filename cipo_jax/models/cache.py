"""Cached decoding: what every layer remembers, in one stack per kind, and the context that reads and writes it."""

import dataclasses

import jax
import jax.numpy as jnp

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DELTA_CHUNK, DecoderConfig
from cipo_jax.models.delta import chunked_delta, recurrent_delta


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """What `B` rows remember. Rows are the second axis of every array.

    Attributes:
      key, value: `[attention layers, B, K, S, E]` of `S` token places per row.
      state: `[delta layers, B, H, E, V]` float32 recurrent states; None without delta layers.
      history: per stream (queries, keys, values) the last inputs of the convolution, `[delta layers, B, taps - 1, heads,
        size]`, oldest first; None without delta layers.
    """

    key: jax.Array
    value: jax.Array
    state: jax.Array | None = None
    history: tuple[jax.Array, jax.Array, jax.Array] | None = None

    @classmethod
    def zeros(cls, config: DecoderConfig, rows: int, places: int, rules: ShardingRules | None = None) -> "KVCache":
        """An empty cache; constrained to the sharding table's `batch`, `kv_heads` and `heads` axes if `rules` is given."""
        c = config

        def empty(shape, axes, dtype=c.compute_dtype):
            x = jnp.zeros(shape, dtype)
            if rules is None:
                return x
            return jax.lax.with_sharding_constraint(x, rules.sharding(axes, shape, "KV cache"))

        kv_shape = (c.attention_layers, rows, c.kv_heads, places, c.head_dim)
        kv_axes = ("layers", "batch", "kv_heads", None, "head_dim")
        cache = cls(empty(kv_shape, kv_axes), empty(kv_shape, kv_axes))
        if not c.delta_layers:
            return cache
        key, value = (c.delta_key_heads, c.delta_key_dim), (c.delta_value_heads, c.delta_value_dim)
        wide = jnp.promote_types(c.compute_dtype, jnp.float32)
        return dataclasses.replace(
            cache,
            state=empty(
                (c.delta_layers, rows, value[0], key[1], value[1]),
                ("layers", "batch", "heads", "head_dim", "head_dim"),
                wide,
            ),
            history=tuple(
                empty((c.delta_layers, rows, c.delta_conv - 1, *size), ("layers", "batch", None, "heads", "head_dim"))
                for size in (key, key, value)
            ),
        )

    def repeat(self, times: int) -> "KVCache":
        """Every row `times` times, copies of one row behind each other."""
        return jax.tree.map(lambda x: jnp.repeat(x, times, axis=1), self)


class CachedContext:
    """Mixing of `C` new tokens per row with the cache and themselves.

    Row `b` brings `count[b] <= C` real tokens that follow its `filled[b]` cached ones; the rest of its lanes are padding,
    whose outputs mean nothing and which leave the cache untouched. A row with `filled` 0 starts anew: whatever its places,
    states and histories hold is not seen.

    Args:
      filled_B, count_B: int32, as above.
      chunk: `C`.
      places: token places per row of the cache.
      read: attention reads this many of them (static; all if None). Exact for rows whose `filled + count` is at most
        `read`; what other rows get means nothing, but their new tokens are still written where they belong.
    """

    def __init__(self, filled_B: jax.Array, count_B: jax.Array, chunk: int, places: int, read: int | None = None):
        lane = jnp.arange(chunk, dtype=jnp.int32)[None]
        self.positions = filled_B[:, None] + lane  # [B, C], rotary positions too
        self.filled, self.count = filled_B, count_B
        self.real = lane < count_B[:, None]
        self.place = jnp.where(self.real, self.positions, places)  # out of bounds: dropped
        self.read = places if read is None else min(read, places)
        self.mask = jnp.arange(self.read, dtype=jnp.int32)[None, None] <= self.positions[:, :, None]  # [B, C, read]

    def attention(self, q_BCHE, k_BCKE, v_BCKE, cache: KVCache, layer):
        """See `models.decoder.Context`."""
        B, C, H, E = q_BCHE.shape
        K = k_BCKE.shape[2]
        row = jnp.arange(B)[:, None]

        def write(stack, new):
            return stack.at[layer, row, :, self.place].set(new, mode="drop")

        cache = dataclasses.replace(cache, key=write(cache.key, k_BCKE), value=write(cache.value, v_BCKE))
        wide = jnp.promote_types(q_BCHE.dtype, jnp.float32)
        q = (q_BCHE * jnp.asarray(E**-0.5, q_BCHE.dtype)).reshape(B, C, K, H // K, E)
        s = jnp.einsum("bckge,bkse->bkgcs", q, cache.key[layer, :, :, : self.read], preferred_element_type=wide)
        p = jax.nn.softmax(jnp.where(self.mask[:, None, None], s, -1e30), -1).astype(q.dtype)
        out = jnp.einsum("bkgcs,bkse->bckge", p, cache.value[layer, :, :, : self.read])
        return out.reshape(B, C, H, E), cache

    def delta(self, inputs, cache: KVCache, layer):
        """See `models.decoder.Context`."""
        B, C = self.real.shape
        taps, row = inputs.kernels[0].shape[0], jnp.arange(B)[:, None]
        inputs = inputs.silenced(self.real)
        fresh = (self.filled == 0)[:, None, None, None]
        lines = [
            jnp.concatenate([jnp.where(fresh, 0, stack[layer]).astype(x.dtype), x], 1)
            for stack, x in zip(cache.history, inputs.streams, strict=True)
        ]
        back = taps - 1
        q, k, v = inputs.convolved([[x[:, back - t : back - t + C] for t in range(taps)] for x in lines])
        state = jnp.where(fresh, 0.0, cache.state[layer])
        if C == 1:
            out, state = recurrent_delta(q, k, v, inputs.log_decay, inputs.beta, initial=state)
        else:
            scan = chunked_delta(q, k, v, inputs.log_decay, inputs.beta, initial=state, chunk=DELTA_CHUNK)
            out, state = scan.out, scan.final
        # A fresh row without new tokens stays as it was, and is fresh again next time.
        newest = self.count[:, None] + jnp.arange(back, dtype=jnp.int32)[None]
        return out, dataclasses.replace(
            cache,
            state=cache.state.at[layer].set(state),
            history=tuple(
                stack.at[layer].set(x[row, newest].astype(stack.dtype))
                for stack, x in zip(cache.history, lines, strict=True)
            ),
        )
