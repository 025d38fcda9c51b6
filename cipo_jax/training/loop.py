"""The training run: warm start, RL with periodic evaluation and checkpoints, then one look at the reported questions."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import gin
import numpy as np
from jax.sharding import Mesh

from cipo_jax.data.iteration import question_batches
from cipo_jax.distributed.mesh import data_shards, mesh
from cipo_jax.errors import UserError
from cipo_jax.evaluation.behaviour import judge_all, summarise
from cipo_jax.evaluation.closed_book import CLOSED_BOOK, NoPassages, closed_book_questions, score_closed_book
from cipo_jax.evaluation.pairs import preference
from cipo_jax.evaluation.report import make_summary, results_table, write_summary
from cipo_jax.evaluation.scripted import evidence_pairs, run_scripted
from cipo_jax.evaluation.scripted import memory as memory_agent
from cipo_jax.evaluation.scripted import oracle as oracle_agent
from cipo_jax.models.config import DecoderConfig
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.checkpoints import Checkpoints, StopSignal, abstract_like
from cipo_jax.training.evaluate import Evaluator
from cipo_jax.training.metrics import CompileCounter, MetricsWriter
from cipo_jax.training.plots import plot_curves
from cipo_jax.training.policy import Policy
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import RunDir
from cipo_jax.training.samples import samples_path, write_samples
from cipo_jax.training.step import Method, Stepper, StepRecord
from cipo_jax.training.task import Task
from cipo_jax.training.warm_start import WarmStartConfig, supervised_learner, warm_start

WALL = "wall_s"  # file with the seconds spent so far


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Run:
    """One experiment, as its gin file describes it.

    Attributes:
      task: builds the task.
      decoder: the policy's shape, such as `@checkpoint_decoder()`.
      weights: folder, `.safetensors` or `.gguf` file of the initial policy; None for random parameters.
      rollout: sizes of trajectories.
      method: the training method.
      warm_start: how the initial policy is taught to talk first; None where it can.
      steps: RL steps.
      seed: of the parameters, sampling and data order. The task has its own.
      eval_every: steps between greedy evaluations on the validation questions, each with a checkpoint.
      eval_batch: questions at a time in evaluation.
      sample_count: trajectories written for people at each evaluation.
      mesh: builds the device mesh.
      abort_after_skips: steps in a row with a loss or gradient that is not finite after which the run gives up.
    """

    task: Callable[[], Task] = gin.REQUIRED
    decoder: DecoderConfig = gin.REQUIRED
    rollout: RolloutConfig = gin.REQUIRED
    method: Method = gin.REQUIRED
    steps: int = gin.REQUIRED
    weights: str | None = None
    warm_start: WarmStartConfig | None = None
    seed: int = 0
    eval_every: int = 8
    eval_batch: int = 96
    sample_count: int = 6
    mesh: Callable[[], Mesh] = mesh
    abort_after_skips: int = 5

    def check(self, device_mesh: Mesh) -> None:
        """Raises UserError where sizes do not fit the mesh; before anything is written or compiled."""
        shards = data_shards(device_mesh)
        sizes = {"Method.questions": self.method.questions, "Run.eval_batch": self.eval_batch}
        for name, size in sizes.items():
            if size % shards:
                raise UserError(f"{name}={size} does not divide over {shards} data shards; use a multiple of {shards}")

    def check_prompts(self, task: Task) -> None:
        """Raises UserError for a question whose prompt is too long for the rollout."""
        limit = self.rollout.prompt_tokens
        for question in (*task.train, *task.validation, *(q for part in task.reported.values() for q in part)):
            tokens = len(task.protocol.prompt_ids(question.question))
            if tokens > limit:
                raise UserError(
                    f"the prompt of question {question.id!r} has {tokens} tokens, more than RolloutConfig.prompt_tokens="
                    f"{limit}; raise that to at least {tokens} or drop the question"
                )


class Training:
    """A run in progress: everything it needs, and its phases as methods.

    Whatever is wrong with the configuration or the data shows when it is made. `open` comes after it, so that an
    experiment that cannot run leaves no directory behind.
    """

    run_dir: RunDir

    def __init__(self, run: Run, progress: Progress, compiles: CompileCounter):
        self.run, self.progress, self.compiles = run, progress, compiles
        self.warm, self.skipped_in_a_row, self.selected = False, 0, 0
        device_mesh = run.mesh()
        run.check(device_mesh)
        self.began = time.monotonic()
        self.task = run.task()
        run.check_prompts(self.task)
        self.policy = Policy(run.decoder, device_mesh, run.weights)
        self.stepper = Stepper(run.method, self.policy, self.task, run.rollout, run.seed)
        self.evaluator = Evaluator(self.stepper.rollout, run.eval_batch)

    def open(self, run_dir: RunDir) -> None:
        """Takes the directory that everything is written to, and says what will run."""
        self.run_dir = run_dir
        path = run_dir.file(WALL)
        self.earlier_s = float(path.read_text()) if path.exists() else 0.0
        run, device_mesh = self.run, self.policy.rules.mesh
        devices = device_mesh.devices.ravel()
        shape = " x ".join(f"{name} {size}" for name, size in device_mesh.shape.items())
        self.progress.say(
            f"{run.method.name}: {self.policy.size / 1e6:.2f} M parameters, {run.decoder.depth} layers, vocabulary "
            f"{run.decoder.vocab_size}, on {len(devices)} {devices[0].platform} device(s), mesh {shape}"
        )
        self.progress.say(
            f"{len(self.task.train)} training, {len(self.task.validation)} validation, "
            f"{sum(map(len, self.task.reported.values()))} reported questions; run directory {run_dir.path}"
        )

    def warm_start(self, stop: StopSignal) -> Any | None:
        """The initial policy's parameters; None when stopped."""
        run = self.run
        if run.warm_start is None:
            self.progress.say(f"weights from {run.weights}" if run.weights else "random parameters, no warm start")
            return self.policy.init(run.seed)
        with Checkpoints(self.run_dir.file("warm_start"), keep=1) as checkpoints:
            finished = checkpoints.latest_step == sum(run.warm_start.steps)
            phases = () if finished else self.task.demonstrations(run.warm_start.top_k)
            state = warm_start(
                self.policy,
                supervised_learner(self.policy, run.warm_start),
                phases,
                self.task.protocol,
                run.warm_start,
                seed=run.seed,
                checkpoints=checkpoints,
                progress=self.progress,
                stop=stop,
            )
        return None if state is None else state.params

    def reinforce(self, reference: Any, stop: StopSignal) -> Any | None:
        """RL from `reference`; the parameters that did best on validation, or None when stopped."""
        run, stepper = self.run, self.stepper
        batches = question_batches(self.task.train, run.method.questions, run.seed)
        state = stepper.learner.init(reference)
        with Checkpoints(self.run_dir.file("checkpoints")) as checkpoints:
            done, position = 0, 0
            continued = checkpoints.latest_step is not None
            if continued:
                state, meta = checkpoints.restore(abstract_like(state))
                done, position = checkpoints.latest_step, meta["metrics_position"]
                if meta["questions"] != batches.fingerprint:
                    raise UserError(f"{self.run_dir.path} was trained on other questions; choose another --run_dir")
                self.progress.say(f"continuing after step {done}")
            with (
                MetricsWriter(self.run_dir.file("metrics.jsonl"), position=position) as writer,
                self.progress.phase("RL", run.steps, done) as phase,
            ):
                pending = None

                def settle(ended=None):
                    nonlocal pending
                    if pending is not None:
                        metrics = pending.metrics(ended)
                        metrics["compiles_after_warmup"] = self.compiles.since_mark if self.warm else 0
                        writer.write(pending.step + 1, metrics)
                        phase.advance(**_shown(metrics))
                        self.check_skipped(metrics, pending)
                        pending = None

                def save(step, score=None):
                    settle()
                    meta = {"metrics_position": writer.sync(), "questions": batches.fingerprint}
                    checkpoints.save(step, state, meta, score=score)
                    self.save_seconds()

                self.warm_up(state.params)
                if not continued:
                    save(0, self.validate(state.params, 0, writer))
                for step in range(done, run.steps):
                    state, record = stepper(state, reference, batches[step], step)
                    settle(record.started)  # the step before: read while this one's update runs
                    pending = record
                    if (step + 1) % run.eval_every == 0 or step + 1 == run.steps:
                        settle()  # the evaluation needs this step's parameters anyway
                        save(step + 1, self.validate(state.params, step + 1, writer))
                    if step == done:
                        settle()
                        checkpoints.wait()
                        self.compiles.mark()  # from here on nothing should compile
                        self.warm = True
                    if stop.requested() and step + 1 < run.steps:
                        save(step + 1)
                        checkpoints.wait()
                        self.progress.say(f"stopped after step {step + 1}; run the same command to continue")
                        return None
            if checkpoints.best_step == run.steps or run.steps == 0:
                best = state
            else:
                best, _ = checkpoints.restore(abstract_like(state), checkpoints.best_step)
            self.selected = checkpoints.best_step
        return best.params

    def validate(self, params: Any, step: int, writer: MetricsWriter) -> float:
        """Greedy EM on the validation questions: what checkpoints are selected on."""
        episodes, trajectories = self.evaluator(params, self.task.validation)
        self.stepper.environment.take_counts()
        metrics = summarise(episodes, self.task.worlds)
        writer.write(step, {f"validation/{name}": value for name, value in metrics.items()})
        visible, hidden = self.stepper.evidence(params, trajectories)
        if self.run_dir.writes:
            count = self.run.sample_count
            behaviours = judge_all(episodes[:count], self.task.worlds)
            write_samples(
                samples_path(self.run_dir.path, step),
                f"step {step}, validation",
                trajectories,
                episodes[:count],
                self.task.tokenizer,
                behaviours=behaviours,
                token_ealr=visible - hidden,
                limit=count,
            )
            plot_curves(writer.path, self.run_dir.file("curves.png"))
        return metrics["em"]

    def check_skipped(self, metrics: Mapping[str, float], record: StepRecord) -> None:
        """Keeps the batch of an update that was skipped for a NaN; gives up after `abort_after_skips` in a row."""
        if not metrics["skipped_updates"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        path = self.run_dir.file("skipped") / f"step_{record.step + 1:06d}.npz"
        if self.run_dir.writes:
            path.parent.mkdir(exist_ok=True)
            np.savez_compressed(path, **vars(record.trajectories))
        if self.skipped_in_a_row >= self.run.abort_after_skips:
            raise UserError(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that was not finite, the last is kept in "
                f"{path}; lower the learning rate or raise Run.abort_after_skips"
            )

    def warm_up(self, params: Any) -> None:
        """Compiles what evaluations and the report call, so that nothing compiles after the first step."""
        self.stepper.evidence(params, self.evaluator(params, self.task.validation[:1])[1])
        self.stepper.environment.take_counts()  # these searches are no step's

    def report(self, reference: Any, params: Any) -> dict[str, Any]:
        """Opens the reported questions, once: before and after, scripted ceiling and floor, closed book."""
        task, rollout = self.task, self.run.rollout
        before, after, oracle, memory = {}, {}, {}, {}
        total = 2 * sum(map(len, task.reported.values()))
        with self.progress.phase("report", total) as phase:
            for stratum, questions in task.reported.items():
                for out, weights in ((before, reference), (after, params)):
                    out[stratum] = summarise(self.evaluator(weights, questions, phase=phase)[0], task.worlds)
                if task.memory is not None:
                    for out, agent in ((oracle, oracle_agent), (memory, memory_agent)):
                        episodes = run_scripted(
                            agent, questions, task.worlds, task.retrievers, task.protocol, rollout.top_k,
                            rollout.observation_tokens,
                        )  # fmt: skip
                        out[stratum] = summarise(episodes, task.worlds)
        closed_book, preferred = None, None
        if task.memory is not None:
            closed_book = tuple(self.closed_book(weights) for weights in (reference, params))
            preferred = self.evidence_preference(reference)
            self.progress.say(
                f"EALR prefers the evidence-following action to the remembered one in {preferred.text(3)} of "
                f"{preferred.n} scripted pairs (after the warm start)"
            )
        headline = next(iter(task.reported))
        strata = {"before": before, "after": after, "oracle": oracle, "memory": memory}
        summary = make_summary(
            method=self.run.method.name,
            seed=self.run.seed,
            steps=self.run.steps,
            wall_s=round(self.seconds(), 1),
            params=self.policy.size,
            compiles_after_warmup=self.compiles.since_mark if self.warm else 0,
            before=before[headline],
            after=after[headline],
            selected_step=self.selected,
            strata=strata,
            closed_book=[c.em.value for c in closed_book] if closed_book else None,
            ealr_prefers_evidence=preferred.value if preferred else None,
        )
        if self.run_dir.writes:
            write_summary(self.run_dir.file("summary.json"), summary)
        estimates = tuple(c.em for c in closed_book) if closed_book else None
        self.progress.print(results_table(strata, closed_book=estimates))
        return summary

    def closed_book(self, params: Any):
        """EM on the memory world when every search comes back empty."""
        environment = self.stepper.environment
        retrievers = environment.retrievers
        environment.retrievers = {CLOSED_BOOK: NoPassages()}
        try:
            return score_closed_book(self.evaluator(params, closed_book_questions(self.task.memory))[0])
        finally:
            environment.retrievers = retrievers

    def evidence_preference(self, params: Any):
        """Share of scripted pairs, on validation questions, in which EALR prefers the evidence-following action."""
        task, rollout = self.task, self.run.rollout
        pairs = evidence_pairs(task.validation, task.worlds, task.retrievers, rollout.top_k)
        shape = self.evaluator(params, task.validation[:1])[1]
        return preference(
            pairs, task.protocol, rollout.observation_tokens, lambda batch: self.stepper.evidence(params, batch), shape
        )

    def seconds(self) -> float:
        """Wall time of this run, earlier parts included."""
        return self.earlier_s + time.monotonic() - self.began

    def save_seconds(self) -> None:
        """Keeps the wall time for a later part of the run."""
        self.run_dir.write(WALL, f"{self.seconds():.1f}\n")


def train(run: Run, open_dir: Callable[[], RunDir], progress: Progress) -> Mapping[str, Any] | None:
    """Runs or continues an experiment.

    Args:
      run: the experiment.
      open_dir: opens its directory; called once everything else that the user may have to mend has been checked.
      progress: what a person sees.

    Returns:
      The summary; None when it was stopped by SIGTERM (everything is saved then).
    """
    with CompileCounter() as compiles, StopSignal() as stop:
        training = Training(run, progress, compiles)
        with open_dir() as run_dir:
            training.open(run_dir)
            try:
                reference = training.warm_start(stop)
                params = None if reference is None else training.reinforce(reference, stop)
                summary = None if params is None else training.report(reference, params)
            finally:
                training.save_seconds()
            run_dir.save_operative_config()
    if summary is not None:
        for name in ("summary.json", "metrics.jsonl", "curves.png", "samples", "checkpoints"):
            progress.say(f"  {run_dir.file(name)}")
    return summary


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    names = {"reward": "reward", "em": "EM", "ealr": "EALR", "searches": "searches", "tokens_per_s": "tokens/s"}
    return {label: metrics[name] for name, label in names.items() if name in metrics}
