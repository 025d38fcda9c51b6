"""Splitting the rows of a batch: into minibatches by group, and each minibatch into microbatches of balanced cost.

Index arrays on the host; `-1` stands for an empty row, so that shapes never change.
"""

from collections.abc import Sequence

import jax
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.types import Array


def minibatch_indices(group_B: Array, count: int, seed: int | Sequence[int]) -> np.ndarray:
    """Splits a batch into minibatches of whole groups, in a seeded order.

    Args:
      group_B: `[B]` int.
      count: number of minibatches.
      seed: of the order, for example `(run seed, step, epoch)`. With `count = 1` the batch keeps its order.

    Returns:
      `[count, R]` int32 row indices, each row once, padded with -1; `R` depends on the number of groups and the largest
      group alone.

    Raises:
      UserError: more minibatches than groups.
    """
    group = np.asarray(group_B)
    ids, first = np.unique(group, return_index=True)
    ids = ids[np.argsort(first)]
    if not 1 <= count <= len(ids):
        raise UserError(f"minibatches={count} must be between 1 and the batch's {len(ids)} groups")
    if count == 1:
        return np.arange(len(group), dtype=np.int32)[None]
    order = ids[np.random.default_rng(seed).permutation(len(ids))]
    largest = max(int((group == g).sum()) for g in ids)
    width = -(-len(ids) // count) * largest
    result = np.full((count, width), -1, np.int32)
    for number, part in enumerate(np.array_split(order, count)):
        rows = np.concatenate([np.flatnonzero(group == g) for g in part])
        result[number, : len(rows)] = rows
    return result


def microbatch_indices(length_N: Array, count: int, shards: int = 1) -> np.ndarray:
    """Splits rows into microbatches of equal row count and balanced token totals.

    Rows are dealt from longest to shortest, one per bin and round, the longest of a round to the bin with the fewest
    tokens; totals then differ by no more than the longest row. Deterministic.

    Args:
      length_N: `[N]` int, tokens per row.
      count: number of microbatches `M`.
      shards: data shards that a microbatch is cut over; its rows are ordered so that contiguous shards balance too.

    Returns:
      `[M, b]` int32, each row once, -1 for empty rows; `b` is the smallest multiple of `shards` with `M b >= N`.

    Raises:
      UserError: `count` or `shards` below 1.
    """
    if count < 1 or shards < 1:
        raise UserError(f"microbatches={count} over {shards} data shards: both must be at least 1")
    length = np.asarray(length_N, np.int64)
    bins = count * shards
    rounds = max(1, -(-len(length) // bins))
    order = np.argsort(-length, kind="stable")
    order = np.concatenate([order, np.full(rounds * bins - len(order), -1)])
    result = np.empty((bins, rounds), np.int32)
    totals = np.zeros(bins, np.int64)
    for number, dealt in enumerate(order.reshape(rounds, bins)):
        emptiest_first = np.argsort(totals, kind="stable")
        result[emptiest_first, number] = dealt
        totals[emptiest_first] += np.where(dealt >= 0, length[dealt], 0) if len(length) else 0
    return result.reshape(count, shards * rounds)


def take_rows(batch: UpdateBatch, index: np.ndarray) -> UpdateBatch:
    """Gathers rows into a host batch: every `[N, ...]` array becomes `index.shape + [...]`.

    Rows at index -1 are empty: length 0, no token in the loss, group -1, zeros elsewhere. Arrays on the device are
    fetched, explicitly.
    """
    batch = jax.device_get(batch)
    index = np.asarray(index)
    empty = index < 0
    safe = np.where(empty, 0, index)

    def take(x):
        rows = np.asarray(x)[safe]
        rows[empty] = 0
        return rows

    taken = batch.map(take)
    taken.group[empty] = -1
    return taken


def split_microbatches(batch: UpdateBatch, count: int, shards: int = 1) -> UpdateBatch:
    """A host batch `[N, ...]` as `[M, b, ...]`, see `microbatch_indices`."""
    return take_rows(batch, microbatch_indices(batch.length, count, shards))
