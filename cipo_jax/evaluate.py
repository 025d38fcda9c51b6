"""Evaluates a policy on an experiment's reported questions: greedy answers, no training.

    python -m cipo_jax.evaluate --gin_file=configs/quickstart.gin --checkpoint=runs/quickstart --out=evaluation

Without --checkpoint the initial policy answers: Run.weights, or random parameters. Other questions are a binding away:

    --gin_binding='qa_task.reported = {"bamboogle": "bamboogle_test.jsonl"}'

OUT then holds evaluation.json (metrics by question set, with 95 % intervals), predictions.jsonl (a line per question)
and samples.html (trajectories to read).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from cipo_jax import cli
from cipo_jax.errors import UserError
from cipo_jax.evaluation.behaviour import judge_all, summarise_behaviours
from cipo_jax.evaluation.report import finite, results_table, share_intervals
from cipo_jax.rollout.episode import Episode
from cipo_jax.training.checkpoints import Checkpoints, abstract_like
from cipo_jax.training.evaluate import Evaluator
from cipo_jax.training.loop import Run
from cipo_jax.training.policy import Policy
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import write_atomic
from cipo_jax.training.samples import write_samples

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "A run's directory; its best checkpoint on validation is evaluated.")
flags.DEFINE_integer("step", None, "Another step of --checkpoint.")
if "out" not in FLAGS:  # audit has one too; tests import both
    flags.DEFINE_string("out", None, "Directory to write to.")


def main() -> None:
    if not FLAGS.out:
        raise UserError("--out is not set; name the directory to write to.")
    evaluate(Run(), Path(FLAGS.out), FLAGS.checkpoint, FLAGS.step, Progress())


def evaluate(
    run: Run, out: Path, checkpoint: str | None = None, step: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Answers the reported questions of an experiment and writes what came out; see the module.

    Args:
      run: the experiment.
      out: directory, made if absent.
      checkpoint: a run's directory or its folder of checkpoints; None for the initial policy.
      step: of the checkpoint; the best on validation when None, else the newest.
      progress: shown while it runs.

    Returns:
      What `evaluation.json` holds.
    """
    progress = progress or Progress(quiet=True)
    task, device_mesh = run.task(), run.mesh()
    policy = Policy(run.decoder, device_mesh, None if checkpoint else run.weights)
    run.check(device_mesh)
    run.check_prompts(task)
    params, source = _params(policy, run, checkpoint, step)
    out.mkdir(parents=True, exist_ok=True)
    progress.say(f"{policy.size / 1e6:.2f} M parameters from {source}")
    evaluator = Evaluator(policy.rollout(policy.environment(task, run.rollout), run.rollout), run.eval_batch)
    metrics, lines = {}, []
    with progress.phase("evaluation", sum(map(len, task.reported.values()))) as phase:
        for name, questions in task.reported.items():
            episodes, trajectories = evaluator(params, questions, phase=phase)
            judged = judge_all(episodes, task.worlds)
            metrics[name] = summarise_behaviours(episodes, judged)
            lines += _predictions(name, episodes, judged)
            if len(metrics) == 1 and jax.process_index() == 0:
                write_samples(
                    out / "samples.html", f"{source}, {name}", trajectories, episodes, task.tokenizer,
                    behaviours=judged, limit=run.sample_count,
                )  # fmt: skip
    report = {"policy": source, "sets": {}}
    for name, values in metrics.items():
        intervals = {key: [e.low, e.high] for key, e in share_intervals(values).items()}
        report["sets"][name] = {**values, "intervals": intervals}
    if jax.process_index() == 0:
        write_atomic(out / "predictions.jsonl", "".join(lines))
        write_atomic(out / "evaluation.json", json.dumps(finite(report), indent=2, allow_nan=False) + "\n")
    progress.print(results_table({"policy": metrics}))
    for name in ("evaluation.json", "predictions.jsonl", "samples.html"):
        progress.say(f"  {out / name}")
    return report


def _params(policy: Policy, run: Run, checkpoint: str | None, step: int | None) -> tuple[Any, str]:
    """The parameters to evaluate and where they are from."""
    if checkpoint is None:
        return policy.init(run.seed), run.weights or f"random parameters, seed {run.seed}"
    folder = Path(checkpoint)
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not folder.is_dir():
        raise UserError(f"--checkpoint={checkpoint} is no directory; name the --run_dir of a training run.")
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), policy.shapes, policy.sharding
    )
    with Checkpoints(folder, read_only=True) as saved:
        step = saved.selected_step if step is None else step
        params = saved.restore({"params": abstract_like(shapes)}, step)[0]["params"]
    return params, f"{folder}, step {step}"


def _predictions(name: str, episodes: Sequence[Episode], judged: Sequence) -> list[str]:
    lines = []
    for episode, behaviour in zip(episodes, judged):
        line = {
            "set": name,
            "id": episode.question.id,
            "question": episode.question.question,
            "golden_answers": list(episode.question.golds),
            "answer": episode.answer,
            "em": float(behaviour.em),
            "f1": float(behaviour.f1),
            "searches": episode.searches,
            "stop_reason": episode.stop_reason,
            "behaviour": behaviour.behaviour,
            "response": episode.response,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return lines


if __name__ == "__main__":
    cli.run(main)
