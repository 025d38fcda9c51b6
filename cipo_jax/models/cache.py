"""Cached decoding: keys and values of every layer in one stack, and the context that reads and writes it."""

import dataclasses

import jax
import jax.numpy as jnp

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """Keys and values `[layers, B, K, S, E]` of `S` token places per row."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def zeros(cls, config: DecoderConfig, rows: int, places: int, rules: ShardingRules | None = None) -> "KVCache":
        """An empty cache; constrained to the sharding table's `batch` and `kv_heads` axes if `rules` is given."""
        shape = (config.depth, rows, config.kv_heads, places, config.head_dim)
        cache = cls(jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype))
        if rules is None:
            return cache
        sharding = rules.sharding(("layers", "batch", "kv_heads", None, "head_dim"), shape, "KV cache")
        return jax.lax.with_sharding_constraint(cache, jax.tree.map(lambda _: sharding, cache))

    def repeat(self, times: int) -> "KVCache":
        """Every row `times` times, copies of one row behind each other."""
        return jax.tree.map(lambda x: jnp.repeat(x, times, axis=1), self)


class CachedContext:
    """Attention of `C` new tokens per row onto the cache and themselves.

    Row `b` brings `count[b] <= C` real tokens that follow its `filled[b]` cached ones; the rest of its lanes are padding,
    whose outputs mean nothing and which leave the cache untouched.
    """

    def __init__(self, filled_B: jax.Array, count_B: jax.Array, chunk: int, places: int):
        lane = jnp.arange(chunk, dtype=jnp.int32)[None]
        self.positions = filled_B[:, None] + lane  # [B, C], rotary positions too
        self.place = jnp.where(lane < count_B[:, None], self.positions, places)  # out of bounds: dropped
        self.mask = jnp.arange(places, dtype=jnp.int32)[None, None] <= self.positions[:, :, None]  # [B, C, S]

    def attention(self, q_BCHE, k_BCKE, v_BCKE, cache: KVCache, layer):
        """See `models.decoder.Context`."""
        B, C, H, E = q_BCHE.shape
        K = k_BCKE.shape[2]
        row = jnp.arange(B)[:, None]

        def write(stack, new):
            return stack.at[layer, row, :, self.place].set(new, mode="drop")

        cache = KVCache(write(cache.key, k_BCKE), write(cache.value, v_BCKE))
        q = (q_BCHE * jnp.asarray(E**-0.5, q_BCHE.dtype)).reshape(B, C, K, H // K, E)
        s = jnp.einsum("bckge,bkse->bkgcs", q, cache.key[layer], preferred_element_type=jnp.float32)
        p = jax.nn.softmax(jnp.where(self.mask[:, None, None], s, -1e30), -1).astype(q.dtype)
        out = jnp.einsum("bkgcs,bkse->bckge", p, cache.value[layer])
        return out.reshape(B, C, H, E), cache
