"""Teaches a policy by demonstrations alone: supervised training on a JSON-lines file of trajectories.

    python -m cipo_jax.warm_start --gin_file=configs/quickstart.gin \
        --demonstrations=trajectories.jsonl --run_dir=runs/taught

One trajectory a line; the loss is on the actions, the rest is what the agent saw. An action that does not search has no
passages, and a question of null is plain text to learn:

    {"question": "Which river flows through the capital of Valdoria?", "turns": [
      {"action": "<think> .. </think><search> capital of Valdoria </search>",
       "passages": [{"title": "Valdoria", "text": "The capital of Valdoria is Brenavik."}]},
      {"action": "<think> .. </think><answer> Ashawen </answer>"}]}

Model, protocol and WarmStartConfig come from the gin file; all of WarmStartConfig.steps are spent on this file. The
checkpoint is left in RUN_DIR/warm_start. From there `python -m cipo_jax.train` with the same --gin_file and --run_dir
goes on with RL. Run the same command again to continue after a stop or a crash.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from cipo_jax import cli
from cipo_jax.data.demonstrations import Demonstration, encode_demonstration, load_demonstrations
from cipo_jax.errors import UserError
from cipo_jax.protocols.base import Protocol
from cipo_jax.training.checkpoints import Checkpoints, StopSignal
from cipo_jax.training.loop import Run
from cipo_jax.training.policy import Policy
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import open_run_dir
from cipo_jax.training.warm_start import WarmStartConfig, supervised_learner, warm_start

FLAGS = flags.FLAGS
flags.DEFINE_string("demonstrations", None, "JSON-lines file of trajectories to learn.")


def main(run_dir: Path) -> None:
    run, progress = Run(), Progress()
    if run.warm_start is None:
        raise UserError("Run.warm_start is not set; bind it to @WarmStartConfig() in the gin file.")
    protocol = run.task().protocol
    config = dataclasses.replace(run.warm_start, steps=(sum(run.warm_start.steps),))
    demonstrations = read(FLAGS.demonstrations, protocol, config)
    policy = Policy(run.decoder, run.mesh(), run.weights)
    with (
        open_run_dir(run_dir, may_change=("Progress.*",)) as opened,
        StopSignal() as stop,
        Checkpoints(opened.file("warm_start"), keep=1) as checkpoints,
    ):
        progress.say(f"{policy.size / 1e6:.2f} M parameters, {len(demonstrations)} demonstrations")
        state = warm_start(
            policy,
            supervised_learner(policy, config),
            (demonstrations,),
            protocol,
            config,
            seed=run.seed,
            checkpoints=checkpoints,
            progress=progress,
            stop=stop,
        )
        progress.say(f"  {checkpoints.directory}" if state is not None else "stopped; run the same command to continue")


def read(path: str | None, protocol: Protocol, config: WarmStartConfig) -> list[Demonstration]:
    """The demonstrations of a file, checked against the lengths that will be compiled.

    Args:
      path: value of `--demonstrations`.
      protocol: encodes them.
      config: lengths and the budget of an observation.

    Raises:
      UserError: no path, or a line that cannot be used; it names file and line.
    """
    if not path:
        raise UserError("--demonstrations is not set; name a JSON-lines file of trajectories (--help shows one).")
    demonstrations = load_demonstrations(path)
    for number, demonstration in zip(_lines(path), demonstrations, strict=True):
        tokens = len(encode_demonstration(demonstration, protocol, config.observation_tokens))
        if tokens > max(config.lengths):
            raise UserError(
                f"{path}:{number}: the trajectory has {tokens} tokens, more than the longest of WarmStartConfig.lengths="
                f"{tuple(config.lengths)}; add a length of at least {tokens} or drop the line"
            )
    return demonstrations


def _lines(path: str) -> Sequence[int]:
    """Numbers of the lines that hold something."""
    text = Path(path).read_text(encoding="utf-8")
    return [number for number, line in enumerate(text.split("\n"), 1) if line.strip()]


if __name__ == "__main__":
    cli.run(main, run_dir=True)
