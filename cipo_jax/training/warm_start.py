"""Supervised training on demonstrations, loss on action tokens only."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np

from cipo_jax.data.demonstrations import Demonstration, TokenRecord, encode_demonstration
from cipo_jax.errors import UserError
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.objective import SupervisedObjective
from cipo_jax.learning.state import TrainState, adamw
from cipo_jax.protocols.base import Protocol
from cipo_jax.training.checkpoints import Checkpoints, StopSignal, abstract_like
from cipo_jax.training.policy import Learner, Policy
from cipo_jax.training.progress import Progress
from cipo_jax.types import Role


@gin.configurable
@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """How the demonstrations are learned; all choices are ours.

    Attributes:
      steps: updates on each phase of demonstrations, in order.
      batch: demonstrations per update.
      lengths: padded row lengths; a demonstration goes to the shortest that holds it, and every batch is of one length.
      observation_tokens: budget of an observation, as in the rollout.
      top_k: passages per search, as in the rollout.
      optimizer: builds the optimiser.
      checkpoint_every: updates between checkpoints.
      seed: of the order.
    """

    steps: Sequence[int] = gin.REQUIRED
    batch: int = 32
    lengths: Sequence[int] = (128, 192)
    observation_tokens: int = 64
    top_k: int = 2
    optimizer: Any = adamw
    checkpoint_every: int = 200
    seed: int = 0


class Batches:
    """Batches of encoded demonstrations by step: the phases one after another, each reshuffled every epoch.

    A batch depends on the records, the seed and its number alone.

    Attributes:
      total: updates of all phases.
      fingerprint: a hash of all records in order; a checkpoint keeps it to refuse other demonstrations on resume.

    Raises:
      UserError: a demonstration is longer than the longest length, or a phase has none to learn.
    """

    def __init__(self, phases: Sequence[Sequence[TokenRecord]], config: WarmStartConfig):
        self.config, self.phases = config, phases
        self.total = sum(config.steps)
        if len(config.steps) != len(phases):
            raise UserError(
                f"WarmStartConfig.steps={tuple(config.steps)} names {len(config.steps)} phases, the demonstrations have "
                f"{len(phases)}; give one number per phase"
            )
        for number, (steps, phase) in enumerate(zip(config.steps, phases)):
            if steps and not phase:
                raise UserError(
                    f"WarmStartConfig.steps={tuple(config.steps)} wants {steps} updates on phase {number}, which has no "
                    "demonstration; write some or set its number to 0"
                )
        longest = max((len(r) for phase in phases for r in phase), default=0)
        if longest > max(config.lengths):
            raise UserError(
                f"a demonstration has {longest} tokens, more than WarmStartConfig.lengths={tuple(config.lengths)}; add "
                f"a length of at least {longest}"
            )
        self.fingerprint = _fingerprint(phases)
        self._orders = [self._order(number, phase) for number, phase in enumerate(phases)]

    def _order(self, number: int, phase: Sequence[TokenRecord]) -> list[np.ndarray]:
        """Record numbers of every batch of one phase."""
        c = self.config
        batches: list[np.ndarray] = []
        epoch = 0
        bins = np.searchsorted(np.asarray(sorted(c.lengths)), [len(r) for r in phase])
        while len(batches) < c.steps[number]:
            rng = np.random.default_rng([c.seed, number, epoch])
            drawn = []
            for size in range(len(c.lengths)):
                members = rng.permutation(np.flatnonzero(bins == size))
                # A short last batch is filled up with its length's first records.
                filled = np.resize(members, -(-len(members) // c.batch) * c.batch) if len(members) else members
                drawn += list(filled.reshape(-1, c.batch))
            batches += [drawn[i] for i in rng.permutation(len(drawn))]
            epoch += 1
        return batches[: c.steps[number]]

    def __getitem__(self, step: int) -> UpdateBatch:
        for phase, order in zip(self.phases, self._orders):
            if step < len(order):
                return self._batch([phase[i] for i in order[step]])
            step -= len(order)
        raise IndexError(step)

    def _batch(self, records: Sequence[TokenRecord]) -> UpdateBatch:
        longest = max(len(r) for r in records)
        width = min(n for n in self.config.lengths if n >= longest)
        shape = (len(records), width)
        batch = UpdateBatch(
            tokens=np.zeros(shape, np.int32),
            action_mask=np.zeros(shape, bool),
            turn=np.full(shape, -1, np.int8),
            length=np.asarray([len(r) for r in records], np.int32),
            group=np.arange(len(records), dtype=np.int32),
            advantage=np.zeros(shape, np.float32),
        )
        for b, record in enumerate(records):
            batch.tokens[b, : len(record)] = record.ids
            batch.action_mask[b, : len(record)] = np.asarray(record.roles) == Role.ACTION
            batch.turn[b, : len(record)] = record.turns
        return batch


def warm_start(
    policy: Policy,
    learner: Learner,
    phases: Sequence[Sequence[Demonstration]],
    protocol: Protocol,
    config: WarmStartConfig,
    *,
    seed: int,
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
    stop: StopSignal | None = None,
) -> TrainState | None:
    """Trains from the initial parameters (or the last checkpoint) on demonstrations.

    Args:
      policy: the decoder.
      learner: supervised objective and optimiser, see `supervised_learner`.
      phases: demonstrations, phase by phase; none are needed where the last checkpoint is that of the last update.
      protocol: encodes them.
      config: the options.
      seed: of random initial parameters.
      checkpoints: where to continue from and save to.
      progress: shown while it runs.
      stop: polled after every update.

    Returns:
      The state after the last update; None when it was stopped (the state is saved then).

    Raises:
      UserError: see `Batches`; or the checkpoint was taught by other demonstrations.
    """
    progress = progress or Progress(quiet=True)
    state = learner.init(policy.init(seed))
    done = checkpoints.latest_step if checkpoints is not None else None
    meta = {}
    if done is not None:
        state, meta = checkpoints.restore(abstract_like(state), done)
    if done == sum(config.steps) and not phases:
        return state
    records = [[encode_demonstration(d, protocol, config.observation_tokens) for d in phase] for phase in phases]
    batches = Batches(records, config)
    if done is not None and meta.get("demonstrations") != batches.fingerprint:
        raise UserError(
            f"{checkpoints.directory} was taught by other demonstrations; choose another --run_dir or remove that folder"
        )
    if done == batches.total:
        return state
    pending = None
    with progress.phase("warm start", batches.total, done or 0) as phase:
        for step in range(done or 0, batches.total):
            state, metrics = learner.update(state, batches[step], step)
            if pending is not None:  # read one step late, while the next one runs
                phase.advance(loss=float(pending["loss"]), grad_norm=float(pending["grad_norm"]))
            pending = metrics
            stopping = stop is not None and stop.requested()
            last = step + 1 == batches.total
            if checkpoints is not None and (last or stopping or (step + 1) % config.checkpoint_every == 0):
                checkpoints.save(step + 1, state, {"demonstrations": batches.fingerprint})
            if stopping and not last:
                checkpoints.wait()
                return None
        if pending is not None:
            phase.advance(loss=float(pending["loss"]))
    return state


def supervised_learner(policy: Policy, config: WarmStartConfig) -> Learner:
    """The learner of the warm start."""
    return Learner(policy, SupervisedObjective(), config.optimizer())


def _fingerprint(phases: Sequence[Sequence[TokenRecord]]) -> str:
    """SHA-256 (hex) over the tokens and roles of all records, in order."""
    digest = hashlib.sha256()
    for number, phase in enumerate(phases):
        for record in phase:
            digest.update(np.asarray([number, len(record), *record.ids, *record.roles], np.int64).tobytes())
    return digest.hexdigest()
