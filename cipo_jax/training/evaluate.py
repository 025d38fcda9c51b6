"""Greedy rollouts over a question set, in batches of one shape."""

from collections.abc import Sequence

import jax
import numpy as np

from cipo_jax.data.questions import Question
from cipo_jax.distributed.arrays import fetch
from cipo_jax.protocols.base import Protocol
from cipo_jax.rollout.engine import Rollout
from cipo_jax.rollout.episode import Episode, read_episodes
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.training.progress import Phase
from cipo_jax.types import Trajectories


class Evaluator:
    """Runs question sets through one rollout program.

    Args:
      rollout: the program.
      batch: questions at a time; a short last batch is filled up and cut back.
    """

    def __init__(self, rollout: Rollout, batch: int):
        self.rollout, self.batch = rollout, batch

    def __call__(
        self, params, questions: Sequence[Question], protocol: Protocol | None = None, phase: Phase | None = None
    ) -> tuple[list[Episode], Trajectories]:
        """One greedy trajectory per question as episodes, and the whole first batch as host arrays."""
        episodes: list[Episode] = []
        first = None
        protocol = protocol or self.rollout.environment.protocol
        for at in range(0, len(questions), self.batch):
            asked = list(questions[at : at + self.batch])
            filled = asked + [asked[-1]] * (self.batch - len(asked))
            trajectories, _ = self.rollout(params, filled, 1, jax.random.key(0), GREEDY, protocol)
            trajectories = fetch(trajectories)
            first = trajectories if first is None else first
            episodes += read_episodes(trajectories, asked, protocol)
            if phase is not None:
                phase.advance(len(asked), em=float(np.mean([e.answer in e.question.golds for e in episodes])))
        return episodes, first


GREEDY = Sampling(np.float32(0.0), np.int32(0), np.float32(1.0))
