"""Slots: places where trajectories are written, and the queue that fills them.

Rows (trajectories) and slots are split over the data shards alike, and a shard's rows stay on its slots: everything here
works within a shard, without communication. Caches are carried by loops and changed in place; a conditional would copy
them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cipo_jax.compat import shard_map
from cipo_jax.distributed.mesh import DATA_AXES
from cipo_jax.models.cache import KVCache
from cipo_jax.types import Role, StopReason, Trajectories


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Slots:
    """What S slots are doing.

    Attributes:
      text: the trajectories being written; `stop_reason` is 0 while a slot is alive.
      row: `[S]` number of the slot's row, -1 before its first.
      limit: `[S, T]` caps of the row's actions.
      cached: `[S]` tokens forwarded.
      turn: `[S]` current action.
      start: `[S]` first token of the current action.
      automaton: `[S]` state of the stop automaton.
      waiting: `[S]` bool, the action has ended and an observation has to follow.
      ticket: `[S]` what the host calls the search under way, 0 if none.
      asked: `[S]` when it was handed in, in decode steps.
      hidden: `[S, D]` last hidden state of the prompt, from which the first token is sampled.
      next: `[S]` the next row of the slot's shard, counted within the shard.
    """

    text: Trajectories
    row: Any
    limit: Any
    cached: Any
    turn: Any
    start: Any
    automaton: Any
    waiting: Any
    ticket: Any
    asked: Any
    hidden: Any
    next: Any

    @property
    def alive(self):
        """`[S]` bool."""
        return self.text.stop_reason == 0

    @property
    def running(self):
        """`[S]` bool, slots that can decode."""
        return self.alive & ~self.waiting

    @property
    def behind(self):
        """`[S]` bool, slots with more known tokens to forward than the last one."""
        return self.alive & (self.text.length - self.cached > 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Queue:
    """What a row starts from; Q questions, N rows.

    Attributes:
      prompt: `[Q, P]` int32.
      count: `[Q]` tokens of each prompt.
      hidden: `[Q, D]` hidden state of its last token.
      cache: what the prompt leaves behind, `P` places per row.
      limit: `[N, T]` caps of each row's actions.
    """

    prompt: Any
    count: Any
    hidden: Any
    cache: KVCache
    limit: Any


def empty_text(rows: int, tokens: int, turns: int, passages: int) -> Trajectories:
    """Trajectories without a token, of stop reason 0."""
    spans = [jnp.zeros((rows, turns, 2), jnp.int32) for _ in range(3)]
    return Trajectories(
        tokens=jnp.zeros((rows, tokens), jnp.int32),
        role=jnp.full((rows, tokens), Role.PAD, jnp.int8),
        turn=jnp.full((rows, tokens), -1, jnp.int8),
        behaviour_logprob=jnp.zeros((rows, tokens), jnp.float32),
        length=jnp.zeros(rows, jnp.int32),
        group=jnp.zeros(rows, jnp.int32),
        stop_reason=jnp.zeros(rows, jnp.int32),
        action_span=spans[0],
        evidence_span=spans[1],
        content_span=spans[2],
        passage_span=jnp.zeros((rows, turns, passages, 2), jnp.int32),
        passage_row=jnp.full((rows, turns, passages), -1, jnp.int32),
    )


def empty_slots(text: Trajectories, hidden) -> Slots:
    """Slots without a row, to be refilled; `text` is empty, `hidden` has the width and dtype of hidden states."""
    rows, turns = text.action_span.shape[:2]
    zero = jnp.zeros(rows, jnp.int32)
    return Slots(
        text=dataclasses.replace(text, stop_reason=zero + StopReason.TOKEN_LIMIT),
        row=zero - 1,
        limit=jnp.zeros((rows, turns), jnp.int32),
        cached=zero,
        turn=zero,
        start=zero,
        automaton=zero,
        waiting=zero > 0,
        ticket=zero,
        asked=zero,
        hidden=jnp.zeros((rows, hidden.shape[1]), hidden.dtype),
        next=zero,
    )


def _prompted(text: Trajectories, prompt, count, group) -> Trajectories:
    """One empty trajectory with its prompt, alive."""
    places = text.tokens.shape[1]
    real = jnp.arange(places)[None] < count[:, None]
    return dataclasses.replace(
        text,
        tokens=jnp.where(real, jnp.pad(prompt, ((0, 0), (0, places - prompt.shape[1]))), 0),
        role=jnp.where(real, Role.PROMPT, Role.PAD).astype(jnp.int8),
        length=count,
        group=group[None],
        stop_reason=jnp.zeros(1, jnp.int32),
    )


def refill(mesh: Mesh, slots: Slots, cache: KVCache, out: Trajectories, queue: Queue):
    """Stores the finished slots' trajectories and gives those slots the next rows of their shards, while there are any.

    Returns:
      `(slots, cache, out)`.
    """

    def shard(slots: Slots, cache: KVCache, out: Trajectories, queue: Queue):
        rows, samples = out.length.shape[0], out.length.shape[0] // queue.count.shape[0]
        first = _shard_number(mesh) * rows

        def body(carry):
            slots, cache, out = carry
            at, row = jnp.argmax(~slots.alive), slots.next[0]
            # A slot that has had no row yet stores nonsense where its first row will be stored later.
            before = slots.row[at] - first
            out = _put(out, _take(slots.text, at), jnp.where(before < 0, row, before))
            question = row // samples
            prompt, count, hidden = (_take(x, question) for x in (queue.prompt, queue.count, queue.hidden))
            new = empty_slots(empty_text(1, *slots.text.tokens.shape[1:], *slots.text.passage_row.shape[1:]), hidden)
            new = dataclasses.replace(
                new,
                text=_prompted(new.text, prompt, count, (first + row) // samples),
                row=(first + row)[None],
                limit=_take(queue.limit, row),
                cached=count,
                start=count,
                hidden=hidden,
            )
            slots = dataclasses.replace(_put(slots, new, at), next=slots.next + 1)
            return slots, cache.put_row(at, queue.cache, question), out

        return jax.lax.while_loop(lambda c: refillable(c[0], rows).any(), body, (slots, cache, out))

    row, cached = PartitionSpec(DATA_AXES), PartitionSpec(None, DATA_AXES)
    queue_spec = Queue(row, row, row, cached, row)
    return _within_shards(shard, mesh, (row, cached, row, queue_spec), (row, cached, row))(slots, cache, out, queue)


def refillable(slots: Slots, rows_per_shard: int):
    """`[S]` bool, finished slots whose shard has rows left."""
    return ~slots.alive & (slots.next < rows_per_shard)


def store(mesh: Mesh, slots: Slots, out: Trajectories) -> Trajectories:
    """Stores the trajectories that the slots hold at the end."""

    def shard(slots: Slots, out: Trajectories):
        first = _shard_number(mesh) * out.length.shape[0]
        return jax.lax.fori_loop(
            0, slots.row.shape[0], lambda i, out: _put(out, _take(slots.text, i), slots.row[i] - first), out
        )

    row = PartitionSpec(DATA_AXES)
    return _within_shards(shard, mesh, (row, row), row)(slots, out)


def take_behind(mesh: Mesh, slots: Slots, cache: KVCache, count: int):
    """`count` slots of every shard with those that are behind first.

    Returns:
      `(index, slots, cache)`: their numbers within their shards, for `put_back`, and copies of what they hold.
    """

    def shard(slots: Slots, cache: KVCache):
        index = jnp.argsort(~slots.behind)[:count]
        each = [(_take(slots, i), _take(cache, i, 1)) for i in index]
        return (
            index,
            jax.tree.map(lambda *x: jnp.concatenate(x), *(s for s, _ in each)),
            jax.tree.map(lambda *x: jnp.concatenate(x, 1), *(c for _, c in each)),
        )

    row, cached = PartitionSpec(DATA_AXES), PartitionSpec(None, DATA_AXES)
    return _within_shards(shard, mesh, (row, cached), (row, row, cached))(slots, cache)


def put_back(mesh: Mesh, slots: Slots, cache: KVCache, index, cached, new_cache: KVCache):
    """Writes what extending has changed in the slots that `take_behind` took: `cached` and the cache."""

    def shard(slots: Slots, cache: KVCache, index, cached, new_cache):
        for i, at in enumerate(index):
            cache = _put(cache, _take(new_cache, i, 1), at, 1)
        return dataclasses.replace(slots, cached=slots.cached.at[index].set(cached)), cache

    row, cache_spec = PartitionSpec(DATA_AXES), PartitionSpec(None, DATA_AXES)
    specs = (row, cache_spec, row, row, cache_spec)
    return _within_shards(shard, mesh, specs, (row, cache_spec))(slots, cache, index, cached, new_cache)


def _within_shards(fn, mesh: Mesh, in_specs, out_specs):
    """`fn` on each data shard; how arrays are split over the other axes is left to the compiler."""
    return shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(DATA_AXES), check_vma=False)


def _shard_number(mesh: Mesh):
    return jax.lax.axis_index(DATA_AXES)


def _take(tree, index, axis: int = 0):
    """Row `index` of every array, with its axis."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, axis), tree)


def _put(tree, new, index, axis: int = 0):
    """Writes `new`, one row, at `index` of every array, from the start of all other axes."""

    def one(x, new):
        start = [jnp.int32(0)] * x.ndim
        start[axis] = jnp.asarray(index, jnp.int32)
        return jax.lax.dynamic_update_slice(x, new, start)

    return jax.tree.map(one, tree, new)
