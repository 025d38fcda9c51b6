"""One step of RL: rollout, scoring, rewards, advantages, updates. Reads like the algorithm's box."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import numpy as np

from cipo_jax.data.questions import Question
from cipo_jax.distributed.arrays import fetch
from cipo_jax.errors import UserError
from cipo_jax.evaluation.behaviour import summarise
from cipo_jax.learning.advantages import (
    AdvantageConfig,
    group_statistics,
    last_turn,
    token_advantages,
    turn_advantages,
)
from cipo_jax.learning.batch import update_batch
from cipo_jax.learning.microbatch import minibatch_indices, take_rows
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.learning.state import TrainState, adamw
from cipo_jax.protocols.base import ActionKind
from cipo_jax.rewards.evidence import EvidenceConfig, ealr, turn_values
from cipo_jax.rewards.outcome import f1
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.rollout.episode import Episode, read_episodes
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.counterfactuals import Counterfactual, Masked
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.scoring.pieces import ScorerInPieces
from cipo_jax.training.policy import Learner, Policy
from cipo_jax.training.task import Task
from cipo_jax.types import Trajectories, TurnRewards


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Method:
    """A training method: what is rewarded and how it becomes an update. Defaults are CIPO's (arXiv 2608.06128).

    Attributes:
      name: shown in tables and written to `summary.json`.
      outcome_reward: reward of the final answer, see `rewards/outcome.py`.
      advantages: how rewards become advantages; `ealr_weight = 0` is outcome-only GRPO and skips EALR's scoring copies.
      evidence: how EALR becomes a turn reward.
      counterfactual: what EALR hides.
      objective: the loss.
      questions: questions per step.
      samples: trajectories per question.
      temperature: of sampling and of every log-prob in the objective.
      minibatches: optimiser steps per pass over a rollout batch.
      epochs: passes over a rollout batch.
      microbatches: pieces of a minibatch whose gradients are accumulated.
      scoring_microbatches: pieces that a rollout batch is scored in; None for as many rows at a time as an update takes,
        `minibatches * microbatches` pieces.
      recompute_old: take the old log-probs from the scoring pass instead of the sampler. Needed where they differ in
        dtype or weights; then temperature must be 1.
      copy_capacity: places per row for counterfactual copies; None for a row's length.
      optimizer: builds the optimiser.
    """

    name: str = "cipo"
    outcome_reward: Callable[..., float] = f1
    advantages: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    evidence: EvidenceConfig = dataclasses.field(default_factory=EvidenceConfig)
    counterfactual: Counterfactual = dataclasses.field(default_factory=Masked)
    objective: Any = dataclasses.field(default_factory=ClippedObjective)
    questions: int = 32
    samples: int = 16
    temperature: float = 1.0
    minibatches: int = 2
    epochs: int = 1
    microbatches: int = 1
    scoring_microbatches: int | None = None
    recompute_old: bool = False
    copy_capacity: int | None = None
    optimizer: Any = adamw

    def __post_init__(self):
        if not self.temperature > 0:
            raise UserError(f"Method.temperature={self.temperature}: training samples, so it must be positive")
        if self.recompute_old and self.temperature != 1.0:
            raise UserError(f"Method.recompute_old needs Method.temperature = 1, it is {self.temperature}")
        for name in ("questions", "samples", "minibatches", "epochs", "microbatches", "scoring_pieces"):
            if getattr(self, name) < 1:
                name = name.replace("pieces", "microbatches")
                raise UserError(f"Method.{name}={getattr(self, name)}: use a whole number from 1")

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps per rollout batch."""
        return self.minibatches * self.epochs

    @property
    def scoring_pieces(self) -> int:
        """Pieces that a rollout batch is scored in."""
        return self.minibatches * self.microbatches if self.scoring_microbatches is None else self.scoring_microbatches

    @property
    def scoring_rows(self) -> int:
        """Trajectories scored at a time, over all devices."""
        return -(-self.questions * self.samples // self.scoring_pieces)


class Stepper:
    """Runs steps of one method on one task. Programs are compiled by the first step and only called after it.

    Args:
      method: the method.
      policy: the decoder on its mesh.
      task: questions and passages.
      rollout: sizes of trajectories.
      seed: of sampling and minibatch order.
    """

    def __init__(self, method: Method, policy: Policy, task: Task, rollout: RolloutConfig, seed: int):
        self.method, self.policy, self.task, self.seed = method, policy, task, seed
        self.environment = policy.environment(task, rollout)
        self.rollout = policy.rollout(self.environment, rollout)
        self.learner = Learner(policy, method.objective, method.optimizer(), method.microbatches, method.temperature)
        scorer = ScorerInPieces(policy.scorer, method.scoring_rows, policy.rules)
        self._evidence = EvidenceScorer(scorer, method.counterfactual, policy.rules, method.copy_capacity)
        self._visible = jax.jit(scorer.__call__, out_shardings=policy.rules.batch)
        self._ealr = jax.jit(ealr)
        self._sampling = Sampling(np.float32(method.temperature), np.int32(0), np.float32(1.0))

    def use(self, method: Method, task: Task, seed: int) -> None:
        """Switches to a method that differs in rewards alone, another task and seed; compiled programs stay."""
        self.method, self.task, self.seed = method, task, seed
        self.environment.retrievers = task.retrievers
        self._evidence.counterfactual = method.counterfactual
        self._evidence.capacity = method.copy_capacity

    def __call__(
        self, state: TrainState, reference: Any, questions: Sequence[Question], step: int
    ) -> tuple[TrainState, "StepRecord"]:
        """One step.

        Args:
          state: the policy being trained; donated.
          reference: parameters of the initial policy, for the KL term.
          questions: `method.questions` of them.
          step: number of the step; with the seed it fixes every random choice.

        Returns:
          The new state, and what happened; its device metrics are read by `StepRecord.metrics`.
        """
        m, clock = self.method, time.perf_counter()
        use_evidence = m.advantages.ealr_weight != 0
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        device, counters = self.rollout(state.params, questions, m.samples, key, self._sampling)
        trajectories: Trajectories = fetch(device)
        rolled = time.perf_counter()

        # Dispatched first: the device scores while the host reads the answers.
        args = (device.tokens, device.length, device.action_mask)
        ref = self._visible(reference, *args, np.float32(m.temperature))[0]
        scores = self._evidence(state.params, device, trajectories) if use_evidence else None
        episodes = read_episodes(trajectories, [q for q in questions for _ in range(m.samples)], self.task.protocol)
        outcome = self._outcomes(episodes)
        rewards, gap, token_ealr, ealr_stats = self._rewards(trajectories, episodes, outcome, scores, step)
        scored = time.perf_counter()

        advantage = turn_advantages(rewards, trajectories.group, last_turn(trajectories), m.advantages)
        advantage = token_advantages(advantage, trajectories)
        old = scores.fetch()[0] if m.recompute_old and scores else trajectories.behaviour_logprob
        batch = update_batch(trajectories, advantage, old, fetch(ref), skip_zero_groups=m.advantages.skip_zero_groups)
        updates = []
        for epoch in range(m.epochs):
            for rows in minibatch_indices(trajectories.group, m.minibatches, (self.seed, step, epoch)):
                number = step * m.updates_per_step + len(updates)
                state, metrics = self.learner.update(state, take_rows(batch, rows), number)
                updates.append(metrics)
        record = StepRecord(
            step=step,
            trajectories=trajectories,
            episodes=episodes,
            token_ealr=token_ealr,
            host=self._metrics(trajectories, episodes, outcome, advantage)
            | ealr_stats
            | self.environment.take_counts()
            | gap
            | {"rollout_s": rolled - clock, "scoring_s": scored - rolled},
            device=(updates, counters),
            started=clock,
        )
        return state, record

    def evidence(self, params: Any, host: Trajectories) -> tuple[np.ndarray, np.ndarray]:
        """Visible and counterfactual log-probs `[B, L]` of trajectories given as host arrays."""
        visible, _, hidden = self._evidence(params, self.policy.rules.put_batch(host), host).fetch()
        return visible, hidden

    def _outcomes(self, episodes: Sequence[Episode]) -> np.ndarray:
        protocol, reward = self.task.protocol, self.method.outcome_reward
        return np.asarray(
            [reward(e.response, e.answer, e.question.golds, protocol.format_valid(e.response)) for e in episodes],
            np.float32,
        )

    def _rewards(self, trajectories, episodes, outcome, scores, step):
        """Turn rewards, the sampler-scorer gap, per-token EALR and EALR's statistics."""
        m = self.method
        shape = trajectories.action_span.shape[:2]
        malformed = np.asarray([e.malformed for e in episodes])
        if scores is None:
            none = TurnRewards(outcome, np.zeros(shape, np.float32), np.zeros(shape, bool))
            return none, {}, None, {}
        visible, _, hidden = scores.fetch()
        value, valid = fetch(self._ealr(visible, hidden, trajectories))
        answers = np.zeros(shape, bool)
        for b, episode in enumerate(episodes):
            for t, turn in enumerate(episode.turns):
                answers[b, t] = turn.action.kind is ActionKind.ANSWER
        stats = {"ealr": _mean(value[valid]), "ealr_std": float(value[valid].std()) if valid.any() else 0.0}
        stats["ealr_search"], stats["ealr_answer"] = _mean(value[valid & ~answers]), _mean(value[valid & answers])
        for t in range(1, shape[1]):
            if valid[:, t].any():
                stats[f"ealr_turn_{t}"] = _mean(value[:, t][valid[:, t]])
        stats["ealr_gated"] = float((malformed[:, None] & valid).sum() / max(valid.sum(), 1))
        value, valid = turn_values(value, valid, malformed, answers, trajectories.group, m.evidence, (self.seed, step))
        gap = {}
        if m.temperature == 1.0:
            mask = trajectories.action_mask
            difference = np.abs(visible - trajectories.behaviour_logprob)[mask]
            gap = {"sampler_gap_mean": _mean(difference), "sampler_gap_max": float(difference.max(initial=0.0))}
        return TurnRewards(outcome, value, valid), gap, visible - hidden, stats

    def _metrics(self, trajectories, episodes, outcome, advantage) -> dict[str, float]:
        """Everything that methods.md asks to log and that the host knows."""
        mask, n = trajectories.action_mask, len(episodes)
        judged = summarise(episodes, self.task.worlds)
        response = mask.sum(1)
        observation = trajectories.length - response - (trajectories.role == 1).sum(1)
        answered = np.asarray([e.answer is not None for e in episodes])
        clipped = np.asarray([e.stop_reason == "token_limit" for e in episodes])
        out_of_turns = np.asarray([e.stop_reason == "turn_limit" for e in episodes])
        return {
            "reward": float(outcome.mean()),
            "reward_std": float(outcome.std()),
            **judged,
            **group_statistics(outcome, advantage, trajectories.group),
            "response_tokens": float(response.mean()),
            "observation_tokens": float(observation.mean()),
            "total_tokens": float(trajectories.length.mean()),
            "length_clip_ratio": float(clipped.mean()),
            "no_valid_answer_ratio": float(1 - answered.mean()),
            "aborted_ratio": float((out_of_turns | ~answered).mean()),
            "natural_termination_ratio": float(np.mean([e.stop_reason == "answer" for e in episodes])),
            "advantage_abs": float(np.abs(advantage[mask]).mean()) if mask.any() else 0.0,
            "trajectories": float(n),
            "sampled_tokens": float(response.sum()),
        }


@dataclasses.dataclass
class StepRecord:
    """What a step did; device values are fetched when `metrics` is called, normally while the next step runs.

    Attributes:
      step: its number.
      trajectories: host arrays.
      episodes: the same as text.
      token_ealr: `[B, L]` visible minus masked log-prob, None without EALR.
    """

    step: int
    trajectories: Trajectories
    episodes: list[Episode]
    token_ealr: np.ndarray | None
    host: dict[str, float]
    device: tuple[list[dict[str, jax.Array]], dict[str, jax.Array]]
    started: float

    def metrics(self, ended: float | None = None) -> dict[str, float]:
        """All metrics of the step as Python numbers; `ended` is when the next one started, if that was before now."""
        updates, counters = fetch(self.device)
        names = [name for name in updates[0] if name not in ("skipped", "empty")]
        means = {name: float(np.mean([u[name] for u in updates])) for name in names}
        totals = {f"{name}_updates": float(sum(u[name] for u in updates)) for name in ("skipped", "empty")}
        seconds = (ended or time.perf_counter()) - self.started
        return (
            self.host
            | means
            | totals
            | {name: float(value) for name, value in counters.items()}
            | {"step_s": seconds, "tokens_per_s": float(self.trajectories.length.sum()) / seconds}
            | {"retrieval_share": self.host["retrieval_seconds"] / seconds}
        )


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if x.size else 0.0
