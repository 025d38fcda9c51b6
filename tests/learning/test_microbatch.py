"""Splitting rows: every row once, whole groups, balanced totals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.microbatch import microbatch_indices, minibatch_indices, split_microbatches, take_rows

LENGTHS = st.lists(st.integers(0, 100), min_size=1, max_size=40)


def test_golden_balance():
    # Dealt 9 8 | 7 6 | 5 4: the longest of each round goes to the emptier bin.
    np.testing.assert_array_equal(microbatch_indices([4, 9, 8, 5, 7, 6], 2), [[1, 5, 3], [2, 4, 0]])


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 3))
def test_microbatch_properties(lengths, count, shards):
    index = microbatch_indices(lengths, count, shards)
    assert index.shape[0] == count and index.shape[1] % shards == 0
    assert index.size - len(lengths) < count * shards
    assert sorted(index[index >= 0]) == list(range(len(lengths)))
    padded = np.append(np.asarray(lengths), 0)
    totals = padded[index.reshape(count * shards, -1)].sum(1)
    assert totals.max() - totals.min() <= max(lengths)
    np.testing.assert_array_equal(index, microbatch_indices(lengths, count, shards))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_minibatch_properties(groups, size, count, seed):
    group = np.repeat(np.random.default_rng(seed).permutation(100)[:groups], size)
    if count > groups:
        with pytest.raises(UserError, match=f"minibatches={count}"):
            minibatch_indices(group, count, seed)
        return
    index = minibatch_indices(group, count, (seed, 3))
    assert index.shape == (count, -(-groups // count) * size)
    assert sorted(index[index >= 0]) == list(range(len(group)))
    sets = [set(group[row[row >= 0]]) for row in index]
    assert sum(len(s) for s in sets) == groups
    np.testing.assert_array_equal(index, minibatch_indices(group, count, (seed, 3)))


def test_minibatch_order_depends_on_the_seed_and_one_keeps_order():
    group = np.repeat(np.arange(16), 2)
    assert not np.array_equal(minibatch_indices(group, 4, 0), minibatch_indices(group, 4, 1))
    np.testing.assert_array_equal(minibatch_indices(group, 1, 5)[0], np.arange(32))


def test_take_rows_pads_with_empty_rows():
    batch = UpdateBatch(
        tokens=np.arange(6, dtype=np.int32).reshape(2, 3) + 1,
        action_mask=np.ones((2, 3), bool),
        turn=np.zeros((2, 3), np.int8),
        length=np.array([3, 2], np.int32),
        group=np.array([4, 5], np.int32),
        advantage=np.ones((2, 3), np.float32),
    )
    taken = take_rows(batch, np.array([[1, -1], [0, -1]]))
    np.testing.assert_array_equal(taken.tokens, [[[4, 5, 6], [0, 0, 0]], [[1, 2, 3], [0, 0, 0]]])
    np.testing.assert_array_equal(taken.length, [[2, 0], [3, 0]])
    np.testing.assert_array_equal(taken.group, [[5, -1], [4, -1]])
    assert not taken.action_mask[:, 1].any() and taken.old_logprob is None
    np.testing.assert_array_equal(batch.group, [4, 5])
    assert split_microbatches(batch, 2).tokens.shape == (2, 1, 3)
