"""Copies lie behind each other in their row, in as many places as announced, and share no tile without need."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.models.config import DELTA_CHUNK
from cipo_jax.scoring.copies import Copy
from cipo_jax.scoring.packing import TILE, pack, places_needed


def copy(n: int) -> Copy:
    x = np.arange(n, dtype=np.int32)
    return Copy("k", 0, 3, (0, 0), x + 7, x, x)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    rows=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    align=st.sampled_from([1, DELTA_CHUNK]),
)
def test_places_are_enough_and_hold_every_copy_once(lengths, rows, align):
    copies, rows = [copy(n) for n in lengths], np.asarray(rows[: len(lengths)])
    places = places_needed(copies, rows, align)
    packed = pack(copies, rows, np.zeros(len(copies), int), (3, places), align)
    (stream,) = packed.streams
    for c, (n, row, (number, where, at)) in enumerate(zip(lengths, rows, packed.place)):
        assert number == 0 and where == row and at % align == 0
        assert (stream.copy[row, at : at + n] == c).all() and (stream.copy == c).sum() == n
        assert stream.token[row, at : at + n].tolist() == copies[c].token.tolist()
        tiles, least = (at + n - 1) // TILE - at // TILE + 1, -(-n // TILE)
        assert tiles <= least + 1
        assert tiles == least or -at % TILE > TILE // 4  # else it would have moved to the next tile
    # Moving costs a quarter of a tile per copy at most.
    for row in range(3):
        own = [n for n, r in zip(lengths, rows) if r == row]
        used = np.flatnonzero(stream.copy[row] >= 0)
        assert not own or used[-1] + 1 <= sum(own) + len(own) * (TILE // 4 if align == 1 else align)


def test_what_does_not_fit_goes_to_a_further_stream():
    copies = [copy(40), copy(40), copy(20)]
    packed = pack(copies, np.zeros(3, int), np.zeros(3, int), (1, 64))
    assert packed.place == [(0, 0, 0), (1, 0, 0), (0, 0, 40)]
    with pytest.raises(ValueError, match="at least 70"):
        pack([copy(70)], [0], [0], (1, 64))
