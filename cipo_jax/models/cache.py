"""Cached decoding: what every layer remembers, in one stack per kind, and the context that reads and writes it."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DELTA_CHUNK, DecoderConfig
from cipo_jax.models.delta import chunked_delta, recurrent_delta


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """What `B` rows remember. Rows are the second axis of every array.

    XLA's CPU backend copies whatever it slices before it multiplies, which costs several times what the product does. So
    the token places come in parts that are read whole or not at all, and each layer can have arrays of its own.

    Attributes:
      key: per part of the token places, per stack of attention layers, `[layers of the stack, B, K, E, places]`. There is
        one stack of all layers, or one per layer.
      value: likewise, `[layers of the stack, B, K, places, E]`.
      state: per stack of delta layers, `[layers of the stack, B, H, E, V]` float32 recurrent states; empty without any.
      history: per stack, per stream (queries, keys, values) the last inputs of the convolution,
        `[layers of the stack, B, taps - 1, heads, size]`, oldest first; empty without delta layers.
    """

    key: tuple[tuple[jax.Array, ...], ...]
    value: tuple[tuple[jax.Array, ...], ...]
    state: tuple[jax.Array, ...] = ()
    history: tuple[tuple[jax.Array, jax.Array, jax.Array], ...] = ()

    @classmethod
    def zeros(
        cls,
        config: DecoderConfig,
        rows: int,
        places: int,
        rules: ShardingRules | None = None,
        split: bool = False,
        reads: Sequence[int] = (),
    ) -> "KVCache":
        """An empty cache.

        Args:
          config: the decoder it is for.
          rows: `B`.
          places: tokens of a row.
          rules: constrains it to the sharding table's `batch`, `kv_heads` and `heads` axes.
          split: every layer has arrays of its own; for a decoder that is run with `unroll`.
          reads: numbers of places, growing, that a `CachedContext` may be told to read; parts end there.
        """
        c = config

        def empty(layers, shape, axes, dtype=c.compute_dtype):
            def one(shape):
                x = jnp.zeros(shape, dtype)
                if rules is None:
                    return x
                return jax.lax.with_sharding_constraint(
                    x, rules.sharding(("layers", "batch", *axes), shape, "KV cache")
                )

            count, depth = (layers, 1) if split else (min(layers, 1), layers)
            return tuple(one((depth, rows, *shape)) for _ in range(count))

        ends = [end for end in reads if end < places] + [places]
        parts = [end - start for start, end in zip([0, *ends], ends)]
        E, K, H = c.head_dim, c.kv_heads, c.delta_value_heads
        wide = jnp.promote_types(c.compute_dtype, jnp.float32)
        streams = [(c.delta_key_heads, c.delta_key_dim)] * 2 + [(H, c.delta_value_dim)]
        lines = [empty(c.delta_layers, (c.delta_conv - 1, *size), (None, "heads", "head_dim")) for size in streams]
        return cls(
            tuple(empty(c.attention_layers, (K, E, n), ("kv_heads", "head_dim", None)) for n in parts),
            tuple(empty(c.attention_layers, (K, n, E), ("kv_heads", None, "head_dim")) for n in parts),
            empty(c.delta_layers, (H, c.delta_key_dim, c.delta_value_dim), ("heads", "head_dim", "head_dim"), wide),
            tuple(zip(*lines, strict=True)),
        )

    def repeat(self, times: int) -> "KVCache":
        """Every row `times` times, copies of one row behind each other."""
        return jax.tree.map(lambda x: jnp.repeat(x, times, axis=1), self)

    def put_row(self, at, other: "KVCache", row) -> "KVCache":
        """Row `at` becomes row `row` of a cache with the same stacks and as many places or fewer, which may be cut into
        other parts; places behind those stay as they are. `at` and `row` may be traced."""

        def put(x, new):
            return jax.lax.dynamic_update_slice_in_dim(x, new, at, 1)

        def take(x):
            return jax.lax.dynamic_slice_in_dim(x, row, 1, 1)

        def tokens(mine, theirs, axis):
            whole = [jnp.concatenate([take(x) for x in stack], axis) for stack in zip(*theirs, strict=True)]
            parts, start = [], 0
            for part in mine:
                end = start + part[0].shape[axis] if part else start
                cut = [
                    jax.lax.slice_in_dim(x, min(start, x.shape[axis]), min(end, x.shape[axis]), 1, axis) for x in whole
                ]
                parts.append(tuple(_put_start(x, new, at) for x, new in zip(part, cut, strict=True)))
                start = end
            return tuple(parts)

        return KVCache(
            tokens(self.key, other.key, 4),
            tokens(self.value, other.value, 3),
            jax.tree.map(lambda x, y: put(x, take(y)), self.state, other.state),
            jax.tree.map(lambda x, y: put(x, take(y)), self.history, other.history),
        )


def _put_start(x, new, at):
    """`x` with `new` at row `at`, from the start of all other axes."""
    return x if new.size == 0 else jax.lax.dynamic_update_slice(x, new, (0, at, *[0] * (x.ndim - 2)))


def _where(stacks, layer):
    """The stack that holds `layer`, and the layer's number in it."""
    return (0, layer) if len(stacks) == 1 else (layer, 0)


def _write(stack, number, place_BC, new_BCKE, axis: int):
    """Writes `new` at places along `axis` of layer `number` of a stack `[layers, B, ..]`; those out of bounds are dropped.

    Row by row, and said so that the partitioner sees it: it gathers the rows of all devices where they are indices.
    """
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, axis),
        scatter_dims_to_operand_dims=(0, axis),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    index = jnp.stack([jnp.full_like(place_BC, number), place_BC], -1)
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(stack, index, new_BCKE.astype(stack.dtype), numbers, mode=mode)


def _replaced(items: tuple, index: int, item) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


class CachedContext:
    """Mixing of `C` new tokens per row with the cache and themselves.

    Row `b` brings `count[b] <= C` real tokens that follow its `filled[b]` cached ones; the rest of its lanes are padding,
    whose outputs mean nothing and which leave the cache untouched. A row with `filled` 0 starts anew: whatever its places,
    states and histories hold is not seen.

    Args:
      filled_B, count_B: int32, as above.
      chunk: `C`.
      places: token places per row of the cache.
      read: attention reads this many of them (static; all if None): cheaper where a part of the cache ends there. Exact
        for rows whose `filled + count` is at most `read`; what other rows get means nothing, but their new tokens are
        still written where they belong.
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
        number, start = _where(cache.key[0], layer), 0
        keys, values, read_keys, read_values = [], [], [], []
        for part_key, part_value in zip(cache.key, cache.value, strict=True):
            key, value = part_key[number[0]], part_value[number[0]]
            end = start + value.shape[3]
            # Negative indices would count from the end.
            place = jnp.where((self.place >= start) & (self.place < end), self.place - start, end - start)
            key = _write(key, number[1], place, k_BCKE, 4)
            value = _write(value, number[1], place, v_BCKE, 3)
            if start < self.read:
                read_keys.append(key[number[1], :, :, :, : self.read - start])
                read_values.append(value[number[1], :, :, : self.read - start])
            keys.append(_replaced(part_key, number[0], key))
            values.append(_replaced(part_value, number[0], value))
            start = end
        cache = dataclasses.replace(cache, key=tuple(keys), value=tuple(values))
        wide = jnp.promote_types(q_BCHE.dtype, jnp.float32)
        q = (q_BCHE * jnp.asarray(E**-0.5, q_BCHE.dtype)).reshape(B, C, K, H // K, E)
        q = jnp.moveaxis(q, 1, 3).reshape(B, K, -1, E)  # all queries of a key head in one dimension
        s = [jnp.einsum("bkqe,bkes->bkqs", q, key, preferred_element_type=wide) for key in read_keys]
        s = jnp.concatenate(s, -1).reshape(B, K, H // K, C, self.read)
        p = jax.nn.softmax(jnp.where(self.mask[:, None, None], s, -1e30), -1).astype(q.dtype)
        p, out, start = p.reshape(B, K, -1, self.read), 0.0, 0
        for value in read_values:
            end = start + value.shape[2]
            out = out + jnp.einsum("bkqs,bkse->bkqe", p[..., start:end], value)
            start = end
        return jnp.moveaxis(out.reshape(B, K, H // K, C, E), 3, 1).reshape(B, C, H, E), cache

    def delta(self, inputs, cache: KVCache, layer):
        """See `models.decoder.Context`."""
        C = self.real.shape[1]
        taps = inputs.kernels[0].shape[0]
        inputs = inputs.silenced(self.real)
        fresh = (self.filled == 0)[:, None, None, None]
        at, number = _where(cache.state, layer)
        state, history = cache.state[at], cache.history[at]
        lines = [
            jnp.concatenate([jnp.where(fresh, 0, stack[number]).astype(x.dtype), x], 1)
            for stack, x in zip(history, inputs.streams, strict=True)
        ]
        back = taps - 1
        q, k, v = inputs.convolved([[x[:, back - t : back - t + C] for t in range(taps)] for x in lines])
        initial = jnp.where(fresh, 0.0, state[number])
        if C == 1:
            out, final = recurrent_delta(q, k, v, inputs.log_decay, inputs.beta, initial=initial)
        else:
            scan = chunked_delta(q, k, v, inputs.log_decay, inputs.beta, initial=initial, chunk=DELTA_CHUNK)
            out, final = scan.out, scan.final
        # A fresh row without new tokens stays as it was, and is fresh again next time.
        newest = (self.count[:, None] + jnp.arange(back, dtype=jnp.int32)[None])[..., None, None]
        history = tuple(
            stack.at[number].set(jnp.take_along_axis(x, newest, 1).astype(stack.dtype))
            for stack, x in zip(history, lines, strict=True)
        )
        return out, dataclasses.replace(
            cache,
            state=_replaced(cache.state, at, state.at[number].set(final)),
            history=_replaced(cache.history, at, history),
        )
