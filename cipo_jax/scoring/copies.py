"""Copies: stretches of a trajectory's later tokens that are scored again while something is hidden from them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cipo_jax.types import Trajectories

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Copy:
    """One stretch to score again. Its tokens see the trajectory before `limit`, `hole` excepted, and each other causally.

    Arrays are int32 `[n]`, one entry per copied token, in order.

    Attributes:
      kind: name of the counterfactual it belongs to.
      turn: the retrieval turn whose evidence it is about.
      limit: trajectory tokens from here on are not seen; recurrent states are taken from here.
      hole: a further `[start, end)` that attention must not see. A recurrent state cannot forget: delta layers see it.
      token: ids.
      position: rotary positions.
      target: place in the trajectory of the action token that this token predicts, -1 where none is wanted.
    """

    kind: str
    turn: int
    limit: int
    hole: Span
    token: np.ndarray
    position: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.token)


def deletion(
    kind: str,
    turn: int,
    trajectories: Trajectories,
    row: int,
    hidden: Sequence[Span],
    scored: Sequence[Span],
    contiguous: bool = False,
    inserted: Sequence[int] = (),
) -> Copy:
    """A copy that reads as if the hidden spans had never been there.

    Every visible token behind the first hidden one is copied, because tokens between a hole and the action have already
    seen what the hole hides (measured leak: .08 to .25 nats a token).

    Args:
      kind, turn: see `Copy`.
      trajectories: host arrays.
      row: which of them.
      hidden: non-empty `[start, end)` spans, in order and apart; none holds the row's first token.
      scored: `[start, end)` spans of action tokens whose log-probs are wanted, in order, behind the first hidden span and
        in none of them.
      contiguous: move positions back over hidden spans; else they keep a gap.
      inserted: token ids to put in place of the first hidden span, at its first positions; at most as many.
    """
    limit, end = hidden[0][0], scored[-1][1]
    visible, wanted = np.ones(end, bool), np.zeros(end, bool)
    for a, b in hidden:
        visible[a:b] = False
    for a, b in scored:
        wanted[a:b] = True
    following = np.flatnonzero(visible[limit:]) + limit
    if wanted[following[0]] and not len(inserted):  # nothing in between: the token before the hole predicts the action
        limit -= 1
        following = np.insert(following, 0, limit)
    source, after = following[:-1], following[1:]
    position = source - (np.cumsum(~visible)[source] if contiguous else 0)
    token = np.asarray(trajectories.tokens[row], np.int32)[source]
    target = np.where(wanted[after], after, -1)
    if len(inserted):
        count = len(inserted)
        reads_first = np.full(count, -1)
        reads_first[-1] = following[0] if wanted[following[0]] else -1
        token = np.concatenate([np.asarray(inserted, np.int32), token])
        position = np.concatenate([limit + np.arange(count), position])
        target = np.concatenate([reads_first, target])
    return Copy(kind, turn, limit, (0, 0), *(x.astype(np.int32) for x in (token, position, target)))


def masked_edges(
    kind: str, turn: int, trajectories: Trajectories, row: int, hidden: Span, first: int, scored: Span
) -> Copy:
    """A copy of the rows from `first` on (or from the hidden span's end, if later) that attention hides a span from.

    Tokens between the span and `first` stay as they were: they have seen it. A scored token that none of these rows
    predicts is not a target; its log-prob is the visible one.
    """
    first = max(first, hidden[1])
    source = np.arange(first, scored[1] - 1, dtype=np.int32)
    target = np.where(source + 1 >= scored[0], source + 1, -1).astype(np.int32)
    return Copy(kind, turn, first, hidden, np.asarray(trajectories.tokens[row], np.int32)[source], source, target)
