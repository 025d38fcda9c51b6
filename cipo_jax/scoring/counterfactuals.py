"""What a trajectory would have looked like to the next action without some of its evidence.

A counterfactual turns each retrieval turn into *copies*: stretches of later tokens that are scored again while a span is
hidden from them. Every later token that stays visible to the scored action is copied, because tokens between a hole and
the action have already seen what the hole hides (measured leak: .08 to .25 nats a token).
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import gin
import numpy as np

from cipo_jax.types import Trajectories


@dataclasses.dataclass(frozen=True)
class Copy:
    """One stretch to score again.

    Attributes:
      turn: the retrieval turn whose evidence this is about.
      hidden: `[start, end)` of the tokens that the copy must not see.
      scored: `[start, end)` of the action tokens whose log-probs are wanted.
      first: first trajectory token that is copied; the copy sees the trajectory before it, `hidden` excepted.
      contiguous: shift positions back over the hidden span, as if it had been deleted; else keep them (a gap).
    """

    turn: int
    hidden: tuple[int, int]
    scored: tuple[int, int]
    first: int
    contiguous: bool = False

    def sources(self) -> list[int]:
        """Trajectory indices of the copied tokens: from the hole to the last row that predicts a scored token."""
        start = max(self.first, self.hidden[1])
        rows = list(range(start, self.scored[1] - 1))
        if self.scored[0] == self.hidden[1] == self.first:
            rows.insert(0, self.hidden[0] - 1)  # no bridge: the token before the hole predicts the first action token
        return rows


class Counterfactual(Protocol):
    """A way to hide evidence. A new one is a new class and a gin line."""

    name: str

    def copies(self, trajectories: Trajectories, row: int) -> list[Copy]:
        """The copies of one row; `trajectories` are host arrays."""


def transitions(trajectories: Trajectories, row: int, evidence_span: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields `(turn, e0, e1, a0, a1)` per retrieval turn with evidence and a non-empty next action.

    `evidence_span` is `content` (the passages' text: tags around it stay visible; our choice) or `block` (the whole
    observation but its last token, which has to predict the action; the published reading).
    """
    spans = trajectories.content_span if evidence_span == "content" else trajectories.evidence_span
    for turn in range(spans.shape[1] - 1):
        e0, e1 = (int(x) for x in spans[row, turn])
        a0, a1 = (int(x) for x in trajectories.action_span[row, turn + 1])
        if evidence_span == "block" and e1 == a0:
            e1 -= 1
        if e1 > e0 and a1 > a0:
            yield turn, e0, e1, a0, a1


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Masked:
    """Evidence hidden from attention, positions kept (CIPO Eq. 4).

    Attributes:
      mask_rows: whose view is recomputed. `post_evidence`: every row after the evidence (our choice: no leak);
        `predictor`: from the row that reads the first action token; `action`: action rows alone, the published reading,
        which leaves the first action token's term at exactly 0 and leaks through the tokens in between.
      evidence_span: `content` or `block`, see `transitions`.
    """

    mask_rows: str = "post_evidence"
    evidence_span: str = "content"
    name: str = "masked"

    def copies(self, trajectories: Trajectories, row: int) -> list[Copy]:
        """See `Counterfactual`."""
        first = {"post_evidence": lambda e1, a0: e1, "predictor": lambda e1, a0: a0 - 1, "action": lambda e1, a0: a0}
        return [
            Copy(turn, (e0, e1), (a0, a1), first[self.mask_rows](e1, a0))
            for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span)
        ]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Removed:
    """Evidence deleted: hidden, and later positions moved back over it."""

    evidence_span: str = "content"
    name: str = "removed"

    def copies(self, trajectories: Trajectories, row: int) -> list[Copy]:
        """See `Counterfactual`."""
        return [
            Copy(turn, (e0, e1), (a0, a1), e1, contiguous=True)
            for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span)
        ]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class RandomSpan:
    """A control: a span as long as the evidence, somewhere before it, is hidden instead.

    The span is drawn by (seed, the row's tokens, turn), never holds the row's first token, and is shortened where the
    text before the evidence is shorter than the evidence (our choice).
    """

    seed: int = 0
    evidence_span: str = "content"
    name: str = "random_span"

    def copies(self, trajectories: Trajectories, row: int) -> list[Copy]:
        """See `Counterfactual`."""
        out = []
        for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span):
            length = min(e1 - e0, e0 - 1)
            if length < 1:
                continue
            content = int(np.asarray(trajectories.tokens[row, :e0], np.int64).sum())
            start = int(np.random.default_rng([self.seed, content, turn]).integers(1, e0 - length + 1))
            out.append(Copy(turn, (start, start + length), (a0, a1), start + length))
        return out
