"""The arms of the comparison study on the synthetic task, all in one process so that programs compile once."""

import dataclasses
from pathlib import Path
from typing import Any

import gin

from cipo_jax.data.iteration import question_batches
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.warm_start import WarmStartMix
from cipo_jax.errors import UserError
from cipo_jax.evaluation.behaviour import summarise
from cipo_jax.evaluation.compare import ArmRunner
from cipo_jax.scoring.counterfactuals import RandomSpan
from cipo_jax.training.checkpoints import Checkpoints, abstract_like
from cipo_jax.training.evaluate import Evaluator
from cipo_jax.training.loop import Run
from cipo_jax.training.policy import Policy
from cipo_jax.training.progress import Progress
from cipo_jax.training.step import Method, Stepper
from cipo_jax.training.task import Task, synthetic_task
from cipo_jax.training.warm_start import supervised_learner, warm_start


def arm_method(base: Method, arm: str) -> Method:
    """The method of an arm; `base` is CIPO.

    Raises:
      UserError: an unknown arm.
    """
    outcome = dataclasses.replace(base.advantages, ealr_weight=0.0)
    changes: dict[str, dict[str, Any]] = {
        "cipo": {},
        "outcome": {"advantages": outcome},
        "outcome_x2": {"advantages": dataclasses.replace(outcome, outcome_weight=2 * base.advantages.outcome_weight)},
        "ealr_shuffle": {"evidence": dataclasses.replace(base.evidence, ealr_shuffle=True)},
        # Hiding an early span copies nearly the whole row.
        "random_span": {"counterfactual": RandomSpan(), "copy_capacity": None},
    }
    if arm not in changes:
        raise UserError(f"Comparison.arms names {arm!r}; use some of {', '.join(changes)}")
    return dataclasses.replace(base, name=arm, **changes[arm])


@gin.configurable
def synthetic_arms(run: Run = gin.REQUIRED, progress: Progress | None = None) -> ArmRunner:
    """What `compare` trains on the synthetic task; see `SyntheticArms`."""
    arms = SyntheticArms(run, progress)
    return ArmRunner(arms.make_warm_start, arms.run_arm)


class SyntheticArms:
    """Trains arms.

    Args:
      run: the experiment every arm shares; its task must be the synthetic one.
      progress: shown while it runs.
    """

    def __init__(self, run: Run, progress: Progress | None = None):
        self.run, self.progress = run, progress or Progress(quiet=True)
        self.policy = Policy(run.decoder, run.mesh(), run.weights)
        self._supervised = supervised_learner(self.policy, run.warm_start)
        self._programs: tuple[Stepper, Evaluator] | None = None
        self._tasks: dict[tuple[int, float], Task] = {}

    def task(self, seed: int, stale: float) -> Task:
        """The synthetic task of a seed."""
        if (seed, stale) not in self._tasks:
            self._tasks.clear()
            world = dataclasses.replace(SyntheticTask(), seed=seed, stale=stale)
            self._tasks[seed, stale] = synthetic_task(world, dataclasses.replace(WarmStartMix(), seed=seed))
        return self._tasks[seed, stale]

    def programs(self, task: Task) -> tuple[Stepper, Evaluator]:
        """The compiled programs, whatever the arm."""
        if self._programs is None:
            stepper = Stepper(self.run.method, self.policy, task, self.run.rollout, 0)
            self._programs = stepper, Evaluator(stepper.rollout, self.run.eval_batch)
        return self._programs

    def make_warm_start(self, seed: int, directory: Path) -> None:
        """Trains the warm start that all arms of a seed begin with."""
        task, config = self.task(seed, 0.0), self.run.warm_start  # demonstrations do not depend on stale
        with Checkpoints(directory, keep=1) as checkpoints:
            warm_start(
                self.policy,
                self._supervised,
                task.demonstrations(config.top_k),
                task.protocol,
                dataclasses.replace(config, seed=seed),
                seed=seed,
                checkpoints=checkpoints,
                progress=self.progress,
            )

    def run_arm(self, arm: str, seed: int, stale: float, warm: Path) -> dict[str, Any]:
        """Trains one arm from the warm start; metrics on the validation questions after the last step.

        The last step is what is reported: nothing is selected on these questions.
        """
        run, task = self.run, self.task(seed, stale)
        stepper, evaluator = self.programs(task)
        stepper.use(arm_method(run.method, arm), task, seed)
        like = self._supervised.init(self.policy.init(seed))
        with Checkpoints(warm, read_only=True) as checkpoints:
            reference = checkpoints.restore(abstract_like(like))[0].params
        before = summarise(evaluator(reference, task.validation)[0], task.worlds)
        state = stepper.learner.init(reference)
        batches = question_batches(task.train, run.method.questions, seed)
        with self.progress.phase(f"{arm}, seed {seed}, stale {stale:g}", run.steps) as phase:
            for step in range(run.steps):
                state, record = stepper(state, reference, batches[step], step)
                phase.advance(reward=record.host["reward"], prior_driven=record.host.get("prior_driven"))
        after = summarise(evaluator(state.params, task.validation)[0], task.worlds)
        stepper.environment.take_counts()
        return after | {"before": before}
