"""Copies laid out as a flat stream behind the trajectories, on the host."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from cipo_jax.models.attention import Visibility
from cipo_jax.scoring.counterfactuals import Copy
from cipo_jax.types import Trajectories


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CopyStream:
    """Copies of several counterfactuals, behind each other in every row. C places a row; all arrays `[B, C]` int32.

    Attributes:
      token: id of the copied token.
      position: its rotary position.
      target: place in the trajectory of the token this place predicts, -1 where none is wanted.
      copy: number of the copy in its row's list, -1 on padding.
      visibility: what each place sees.
    """

    token: jax.Array
    position: jax.Array
    target: jax.Array
    copy: jax.Array
    visibility: Visibility


def pack(trajectories: Trajectories, copies: Sequence[Sequence[Copy]], capacity: int) -> list[CopyStream]:
    """Lays out each row's copies, in order, in streams of `capacity` places (host arrays).

    One stream normally holds all of them. Copies that don't fit go to further streams, which are scored by running the
    same compiled program again: exact, never a recompilation.

    Raises:
      ValueError: one copy alone is longer than `capacity`.
    """
    rows, fields = len(copies), ("token", "position", "target", "copy", "segment", "index", "limit", "hole0", "hole1")
    streams: list[dict[str, np.ndarray]] = []

    def blank():
        out = {name: np.zeros((rows, capacity), np.int32) for name in fields}
        out["segment"][:], out["target"][:], out["copy"][:] = -1, -1, -1
        return out

    tokens = np.asarray(trajectories.tokens)
    for b, row_copies in enumerate(copies):
        number, at = 0, 0
        for c, copy in enumerate(row_copies):
            source = np.asarray(copy.sources(), np.int32)
            n = len(source)
            if n > capacity:
                raise ValueError(
                    f"a copy of {n} tokens does not fit in copy_capacity={capacity}; raise it to at least {n}"
                )
            if at + n > capacity:
                number, at = number + 1, 0
            if number >= len(streams):
                streams.append(blank())
            to, s = slice(at, at + n), streams[number]
            s["token"][b, to] = tokens[b, source]
            behind = source >= copy.hidden[1]
            s["position"][b, to] = source - (copy.hidden[1] - copy.hidden[0]) * (behind if copy.contiguous else 0)
            wanted = source + 1
            if n and not behind[0]:
                wanted[0] = copy.scored[0]
            s["target"][b, to] = np.where((wanted >= copy.scored[0]) & (wanted < copy.scored[1]), wanted, -1)
            s["copy"][b, to], s["segment"][b, to], s["index"][b, to] = c, c + 1, source
            s["limit"][b, to] = source[0] if n else 0
            s["hole0"][b, to], s["hole1"][b, to] = copy.hidden
            at += n
    return [
        CopyStream(
            s["token"],
            s["position"],
            s["target"],
            s["copy"],
            Visibility(s["segment"], s["index"], np.zeros_like(s["index"]), s["limit"], s["hole0"], s["hole1"]),
        )
        for s in streams or [blank()]
    ]
