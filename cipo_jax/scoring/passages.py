"""Counterfactuals about single passages: swapped for another text, or only some of them hidden."""

import dataclasses
from collections.abc import Sequence

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.scoring.copies import Copy, deletion
from cipo_jax.scoring.counterfactuals import EVIDENCE_SPANS, drawn, one_of, transitions
from cipo_jax.types import Trajectories


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Replaced:
    """Evidence swapped for irrelevant text of the same length in tokens, at the same positions.

    Attributes:
      passages: token ids of texts to draw from; None draws the evidence of another group of the batch (our choice: it is
        text of the same kind). A text is repeated or cut to the evidence's length.
      seed: the draw is fixed by (seed, the row's tokens, turn), and by the batch where `passages` is None.
      evidence_span: `content` or `block`, see `counterfactuals.evidence_of`.
    """

    passages: Sequence[Sequence[int]] | None = None
    seed: int = 0
    evidence_span: str = "content"
    name: str = "replaced"

    def __post_init__(self):
        one_of("Replaced", "evidence_span", self.evidence_span, EVIDENCE_SPANS)
        if self.passages is not None:
            object.__setattr__(self, "passages", tuple(tuple(int(i) for i in p) for p in self.passages))
            if not self.passages or not all(self.passages):
                raise UserError("Replaced.passages holds no text or an empty one; give non-empty token ids, or None.")

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        del supportive_TK
        pool = self.passages if self.passages is not None else other_evidence(trajectories, row)
        out = []
        for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span):
            if not len(pool):
                continue  # one group alone
            text = pool[int(drawn(self.seed, trajectories, row, turn, e0).integers(len(pool)))]
            out.append(
                deletion(self.name, turn, trajectories, row, [(e0, e1)], [(a0, a1)], inserted=np.resize(text, e1 - e0))
            )
        return out


def other_evidence(trajectories: Trajectories, row: int) -> list[np.ndarray]:
    """The passages' text of every retrieval turn of the other groups, as token ids, in the batch's order."""
    pool = []
    for b in np.flatnonzero(np.asarray(trajectories.group) != trajectories.group[row]):
        pool += [np.asarray(trajectories.tokens[b, s:e]) for s, e in trajectories.content_span[b] if e > s]
    return pool


@gin.configurable
@dataclasses.dataclass(frozen=True)
class OnlyPassages:
    """Some passages hidden, with the positions of what is left unchanged (`contiguous` moves them together).

    Attributes:
      keep: `supportive` hides the passages that hold no gold answer, `non_supportive` those that do, and a number hides
        that one alone (counted from 0: one passage's own effect).
      contiguous: later positions are moved back over what is hidden; else they keep gaps.
      name: in results; by default `supportive_only`, `non_supportive_only` or `without_<number>`.
    """

    keep: str | int = "supportive"
    contiguous: bool = False
    name: str = ""

    def __post_init__(self):
        if not isinstance(self.keep, int):
            one_of("OnlyPassages", "keep", self.keep, ("supportive", "non_supportive"))
        if not self.name:
            name = f"without_{self.keep}" if isinstance(self.keep, int) else f"{self.keep}_only"
            object.__setattr__(self, "name", name)

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`. A turn that has nothing to hide gives no copy.

        Raises:
          UserError: nobody said which passages hold an answer.
        """
        if supportive_TK is None and not isinstance(self.keep, int):
            raise UserError(
                f"{self.name} needs to know which passages hold a gold answer; pass supportive to the scorer."
            )
        out = []
        for turn, _, _, a0, a1 in transitions(trajectories, row, "content"):
            hidden = []
            for k, (start, end) in enumerate(np.asarray(trajectories.passage_span[row, turn]).tolist()):
                if isinstance(self.keep, int):
                    hide = k == self.keep
                else:
                    hide = bool(supportive_TK[turn, k]) != (self.keep == "supportive")
                if end > start and hide:
                    hidden.append((start, end))
            if hidden:
                out.append(deletion(self.name, turn, trajectories, row, hidden, [(a0, a1)], contiguous=self.contiguous))
        return out


@gin.configurable
def supportive_only(contiguous: bool = False) -> OnlyPassages:
    """Only the passages that hold a gold answer stay."""
    return OnlyPassages("supportive", contiguous)


@gin.configurable
def non_supportive_only(contiguous: bool = False) -> OnlyPassages:
    """Only the passages that hold no gold answer stay."""
    return OnlyPassages("non_supportive", contiguous)
