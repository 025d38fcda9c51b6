"""Trajectories laid out in rows, and copies of them in a flat stream behind each row; on the host."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from cipo_jax.models.attention import Visibility
from cipo_jax.scoring.copies import Copy
from cipo_jax.types import Trajectories

TILE = 64  # side of the smallest attention tile in use


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CopyStream:
    """Copies of several counterfactuals, behind each other in every row. C places a row; all arrays `[R, C]` int32.

    Attributes:
      token: id of the copied token.
      position: its rotary position.
      target: place in the row of the token this place predicts, -1 where none is wanted.
      copy: number of the copy in the list that was packed, -1 on padding.
      visibility: what each place sees.
    """

    token: jax.Array
    position: jax.Array
    target: jax.Array
    copy: jax.Array
    visibility: Visibility


@dataclasses.dataclass(frozen=True)
class Rows:
    """Trajectories packed behind each other in rows of one length; each is a document that sees itself alone.

    Attributes:
      tokens: `[R, L]` int32.
      length: `[R]` int32, real tokens of each row.
      active: `[R, L]` bool, action tokens.
      start: `[R, L]` int32, first place of the document each token belongs to.
      row, offset: `[B]` int, where each trajectory lies.
    """

    tokens: np.ndarray
    length: np.ndarray
    active: np.ndarray
    start: np.ndarray
    row: np.ndarray
    offset: np.ndarray

    @classmethod
    def pack(cls, trajectories: Trajectories, places: int, multiple: int = 1) -> "Rows":
        """Packs host arrays, in order, each into the first row with room.

        Args:
          trajectories: at most `places` tokens each.
          places: length of a row.
          multiple: the number of rows is rounded up to a multiple of this (the shards of a batch).

        Raises:
          ValueError: a trajectory is longer than a row.
        """
        lengths = np.asarray(trajectories.length)
        if len(lengths) and lengths.max() > places:
            raise ValueError(f"a trajectory of {lengths.max()} tokens does not fit in a row of {places}; raise places")
        filled: list[int] = []
        row, offset = np.zeros(len(lengths), int), np.zeros(len(lengths), int)
        for b in range(len(lengths)):
            fits = [r for r, n in enumerate(filled) if n + lengths[b] <= places]
            if not fits:
                fits = [len(filled)]
                filled.append(0)
            row[b], offset[b] = fits[0], filled[fits[0]]
            filled[fits[0]] += int(lengths[b])
        filled += [0] * (-len(filled) % multiple or (multiple if not filled else 0))
        shape = (len(filled), places)
        out = cls(
            np.zeros(shape, np.int32), np.asarray(filled, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32),
            row, offset,
        )  # fmt: skip
        for b, n in enumerate(lengths):
            to = (row[b], slice(offset[b], offset[b] + n))
            out.tokens[to] = trajectories.tokens[b, :n]
            out.active[to] = trajectories.action_mask[b, :n]
            out.start[to] = offset[b]
        return out

    @classmethod
    def one_each(cls, trajectories: Trajectories) -> "Rows":
        """One trajectory per row, as they are."""
        B, L = trajectories.tokens.shape
        none = np.zeros(B, int)
        zero = np.zeros((B, L), np.int32)
        return cls(trajectories.tokens, trajectories.length, trajectories.action_mask, zero, np.arange(B), none)

    def unpack(self, x_RL: np.ndarray, length: int) -> np.ndarray:
        """`[B, length]`: what belongs to each trajectory, padded with 0."""
        x = np.pad(np.asarray(x_RL), ((0, 0), (0, length)))
        out = x[self.row[:, None], self.offset[:, None] + np.arange(length)[None]]
        first = np.pad(self.start, ((0, 0), (0, length)), constant_values=-1)
        inside = self.offset[:, None] + np.arange(length)[None] < self.length[self.row][:, None]
        own = first[self.row[:, None], self.offset[:, None] + np.arange(length)[None]] == self.offset[:, None]
        return np.where(own & inside, out, 0)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Streams of copies and where each copy lies in them.

    Attributes:
      streams: each is scored by one run of the same compiled program.
      place: per copy, in the order given, `(stream, row, first place)`.
    """

    streams: list[CopyStream]
    place: list[tuple[int, int, int]]


def pack(
    copies: Sequence[Copy],
    rows: np.ndarray,
    offsets: np.ndarray,
    shape: tuple[int, int],
    align: int = 1,
) -> Packed:
    """Lays out copies in as few streams as first-fit finds; normally one. Those that don't fit go to further streams.

    Args:
      copies: to lay out.
      rows: the row of each copy's trajectory.
      offsets: the place in that row of its first token.
      shape: `(R, C)` of a stream.
      align: copies start at multiples of this (delta layers take chunks).

    Raises:
      ValueError: one copy alone is longer than a row of the stream.
    """
    fields = ("token", "position", "target", "copy", "segment", "index", "start", "limit", "hole_start", "hole_end")
    streams: list[dict[str, np.ndarray]] = []
    filled: list[np.ndarray] = []
    place = []

    def blank():
        out = {name: np.zeros(shape, np.int32) for name in fields}
        out["segment"][:], out["target"][:], out["copy"][:] = -1, -1, -1
        streams.append(out)
        filled.append(np.zeros(shape[0], int))

    for c, (copy, row, offset) in enumerate(zip(copies, rows, offsets, strict=True)):
        n = len(copy)
        if n > shape[1]:
            raise ValueError(f"a copy of {n} tokens does not fit in copy_capacity={shape[1]}; raise it to at least {n}")
        number = next((i for i, used in enumerate(filled) if _first(used[row], n, align) + n <= shape[1]), len(streams))
        if number == len(streams):
            blank()
        at = _first(int(filled[number][row]), n, align)
        filled[number][row] = at + n
        place.append((number, int(row), at))
        s, to = streams[number], (row, slice(at, at + n))
        s["token"][to], s["position"][to] = copy.token, copy.position
        s["target"][to] = np.where(copy.target >= 0, copy.target + offset, -1)
        s["copy"][to], s["segment"][to], s["index"][to] = c, c + 1, np.arange(n)
        s["start"][to], s["limit"][to] = offset, copy.limit + offset
        s["hole_start"][to], s["hole_end"][to] = (x + offset if copy.hole[1] else 0 for x in copy.hole)
    if not streams:
        blank()
    return Packed([_stream(s) for s in streams], place)


def places_needed(copies: Sequence[Copy], rows: Sequence[int], align: int = 1) -> int:
    """Places per row that hold all copies in one stream; at least one."""
    needed = np.zeros(max([*(int(r) for r in rows), 0]) + 1, int)
    for copy, row in zip(copies, rows, strict=True):
        needed[row] = _first(needed[row], len(copy), align) + len(copy)
    return max(1, -(-int(needed.max()) // align) * align)


def _first(filled: int, length: int, align: int) -> int:
    """Where a copy starts behind `filled` places.

    One that would lie in an attention tile more than it needs starts at the next tile if that is near: a tile that two
    copies share looks at what either of them sees.
    """
    at = -(-filled // align) * align
    spare = -at % TILE
    shares = (at % TILE + length - 1) // TILE > (length - 1) // TILE
    return at + spare if shares and spare <= TILE // 4 else at


def _stream(s: dict[str, np.ndarray]) -> CopyStream:
    visibility = Visibility(
        **{name: s[name] for name in ("segment", "index", "start", "limit", "hole_start", "hole_end")}
    )
    return CopyStream(s["token"], s["position"], s["target"], s["copy"], visibility)
