"""Trajectories read back as what an agent did: for rewards, evaluation and people. Text is never re-encoded."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cipo_jax.data.questions import Question
from cipo_jax.protocols.base import Action, ActionKind, Protocol
from cipo_jax.types import Role, StopReason, Trajectories


@dataclasses.dataclass(frozen=True)
class Turn:
    """One action and the passages that answered it.

    Attributes:
      text: the action as sampled.
      action: what the protocol reads in it.
      passages: rows of the retrieved passages in the question's corpus, in the order shown; empty if nothing was
        retrieved.
    """

    text: str
    action: Action
    passages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Episode:
    """One trajectory as text.

    Attributes:
      question: what was asked.
      turns: actions in order.
      response: everything after the prompt, observations included.
      answer: the last closed answer, None if there is none.
      malformed: no closed non-empty answer, or an action that cannot be parsed.
      stop_reason: name of why it ended.
      length: tokens, prompt included.
    """

    question: Question
    turns: tuple[Turn, ...]
    response: str
    answer: str | None
    malformed: bool
    stop_reason: str
    length: int

    @property
    def searches(self) -> int:
        """Searches that were executed and answered with passages."""
        return sum(bool(t.passages) for t in self.turns)


def read_episodes(trajectories: Trajectories, questions: Sequence[Question], protocol: Protocol) -> list[Episode]:
    """One episode per row of `trajectories` (host arrays); `questions` has one entry per row."""
    episodes = []
    for b, question in enumerate(questions):
        ids = np.asarray(trajectories.tokens[b])
        role = np.asarray(trajectories.role[b])
        turns = []
        for t, (start, end) in enumerate(np.asarray(trajectories.action_span[b])):
            if end > start:
                text = protocol.tokenizer.decode(ids[start:end].tolist())
                rows = tuple(int(r) for r in trajectories.passage_row[b, t] if r >= 0)
                turns.append(Turn(text, protocol.parse_action(text), rows))
        said = ids[(role == Role.ACTION) | (role == Role.OBSERVATION)]
        response = protocol.tokenizer.decode(said.tolist())
        answer = protocol.final_answer(response)
        malformed = not (answer or "").strip() or any(t.action.kind is ActionKind.INVALID for t in turns)
        reason = StopReason.NAMES[int(trajectories.stop_reason[b])]
        episodes.append(
            Episode(question, tuple(turns), response, answer, malformed, reason, int(trajectories.length[b]))
        )
    return episodes
