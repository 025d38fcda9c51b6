"""What a trajectory would have looked like to later actions without some of its evidence (see also `passages.py`).

A counterfactual turns each retrieval turn into a `Copy` of later tokens. Several can share a pass: see `Several`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.scoring.copies import Copy, Span, deletion, masked_edges
from cipo_jax.types import Trajectories

MASK_ROWS = ("post_evidence", "predictor", "action")
EVIDENCE_SPANS = ("content", "block")
GDN_MASKS = ("snapshot", "unmasked")


class Counterfactual(Protocol):
    """A way to hide evidence. A new one is a new class and a gin line."""

    name: str

    def copies(self, trajectories: Trajectories, row: int, supportive_TK: np.ndarray | None = None) -> list[Copy]:
        """The copies of one row.

        Args:
          trajectories: host arrays.
          row: which of them.
          supportive_TK: bool, passages that hold a gold answer; None where nobody knows.
        """


def one_of(owner: str, field: str, value: str, allowed: Sequence[str]) -> None:
    """Raises `UserError` unless `value` is allowed."""
    if value not in allowed:
        raise UserError(f"{owner}.{field}={value!r} is not an option; use one of {', '.join(allowed)}.")


def evidence_of(trajectories: Trajectories, row: int, turn: int, evidence_span: str) -> Span:
    """`[e0, e1)` of what counts as the evidence that answered action `turn`; empty where there is none.

    `evidence_span` is `content` (the passages' text: tags around it stay visible; our choice) or `block` (the whole
    observation but its last token, which has to predict the action; the published reading).
    """
    spans = trajectories.content_span if evidence_span == "content" else trajectories.evidence_span
    e0, e1 = (int(x) for x in spans[row, turn])
    if evidence_span == "block" and turn + 1 < spans.shape[1] and e1 == int(trajectories.action_span[row, turn + 1, 0]):
        e1 -= 1
    return e0, max(e0, e1)


def transitions(trajectories: Trajectories, row: int, evidence_span: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields `(turn, e0, e1, a0, a1)` per retrieval turn with evidence and a non-empty next action."""
    for turn in range(trajectories.action_span.shape[1] - 1):
        e0, e1 = evidence_of(trajectories, row, turn, evidence_span)
        a0, a1 = (int(x) for x in trajectories.action_span[row, turn + 1])
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
      evidence_span: `content` or `block`, see `evidence_of`.
      gdn_mask: what delta layers see, for models that have them. `snapshot` (our choice): the state from before the
        evidence, exact, for `post_evidence` alone; `unmasked`: the state that has read the evidence, which is what an
        attention mask passed to transformers amounts to, and with which the measured effect nearly vanishes.
      name: in results.
    """

    mask_rows: str = "post_evidence"
    evidence_span: str = "content"
    gdn_mask: str = "snapshot"
    name: str = "masked"

    def __post_init__(self):
        one_of("Masked", "mask_rows", self.mask_rows, MASK_ROWS)
        one_of("Masked", "evidence_span", self.evidence_span, EVIDENCE_SPANS)
        one_of("Masked", "gdn_mask", self.gdn_mask, GDN_MASKS)

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        del supportive_TK
        out = []
        for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span):
            if self.mask_rows == "post_evidence" and self.gdn_mask == "snapshot":
                out.append(deletion(self.name, turn, trajectories, row, [(e0, e1)], [(a0, a1)]))
            else:
                first = {"post_evidence": e1, "predictor": a0 - 1, "action": a0}[self.mask_rows]
                out.append(masked_edges(self.name, turn, trajectories, row, (e0, e1), first, (a0, a1)))
        return out


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Removed:
    """Evidence deleted: hidden, and later positions moved back over it."""

    evidence_span: str = "content"
    name: str = "removed"

    def __post_init__(self):
        one_of("Removed", "evidence_span", self.evidence_span, EVIDENCE_SPANS)

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        del supportive_TK
        return [
            deletion(self.name, turn, trajectories, row, [(e0, e1)], [(a0, a1)], contiguous=True)
            for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span)
        ]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class RandomSpan:
    """A control: a span as long as the evidence, somewhere before it, is hidden instead.

    The span is drawn by (seed, the row's tokens, turn), never holds the row's first token, and is shortened where the
    text before the evidence is shorter than the evidence (our choice). Action tokens inside it are hidden, not scored.
    """

    seed: int = 0
    evidence_span: str = "content"
    name: str = "random_span"

    def __post_init__(self):
        one_of("RandomSpan", "evidence_span", self.evidence_span, EVIDENCE_SPANS)

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        del supportive_TK
        out = []
        for turn, e0, e1, a0, a1 in transitions(trajectories, row, self.evidence_span):
            length = min(e1 - e0, e0 - 1)
            if length < 1:
                continue
            start = int(drawn(self.seed, trajectories, row, turn, e0).integers(1, e0 - length + 1))
            out.append(deletion(self.name, turn, trajectories, row, [(start, start + length)], [(a0, a1)]))
        return out


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Window:
    """Evidence hidden from all that follows, and the next `actions` actions scored: does it matter later?

    Attributes:
      actions: how many; None for all later ones (the counterfactual `trajectory`).
      evidence_span: `content` or `block`, see `evidence_of`.
      contiguous: later positions are moved back over the evidence; else they keep a gap.
      name: in results; by default `window` or `trajectory`.
    """

    actions: int | None = None
    evidence_span: str = "content"
    contiguous: bool = False
    name: str = ""

    def __post_init__(self):
        one_of("Window", "evidence_span", self.evidence_span, EVIDENCE_SPANS)
        if self.actions is not None and self.actions < 1:
            raise UserError(f"Window.actions={self.actions} scores nothing; use 1 or more, or None for all.")
        if not self.name:
            object.__setattr__(self, "name", "trajectory" if self.actions is None else "window")

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        del supportive_TK
        spans = [(int(a), int(b)) for a, b in trajectories.action_span[row]]
        out = []
        for turn in range(len(spans) - 1):
            e0, e1 = evidence_of(trajectories, row, turn, self.evidence_span)
            last = None if self.actions is None else turn + 1 + self.actions
            scored = [(a, b) for a, b in spans[turn + 1 : last] if b > a]
            if e1 > e0 and scored:
                out.append(deletion(self.name, turn, trajectories, row, [(e0, e1)], scored, contiguous=self.contiguous))
        return out


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Several:
    """Several counterfactuals in one pass; their names must differ."""

    counterfactuals: Sequence[Counterfactual] = (Masked(), Removed())
    name: str = "several"

    def __post_init__(self):
        object.__setattr__(self, "counterfactuals", tuple(self.counterfactuals))
        names = [c.name for c in self.counterfactuals]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"Several.counterfactuals has two that are named {twice[0]!r}; give one another name.")

    def copies(self, trajectories: Trajectories, row: int, supportive_TK=None) -> list[Copy]:
        """See `Counterfactual`."""
        return [copy for c in self.counterfactuals for copy in c.copies(trajectories, row, supportive_TK)]


def drawn(seed: int, trajectories: Trajectories, row: int, turn: int, before: int) -> np.random.Generator:
    """A generator fixed by (seed, the row's first `before` tokens, turn), whatever batch the row is in."""
    return np.random.default_rng([seed, int(np.asarray(trajectories.tokens[row, :before], np.int64).sum()), turn])
