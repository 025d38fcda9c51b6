"""Trains a search agent: warm start, RL, evaluation. Run the same command again to continue after a stop or a crash.

    python -m cipo_jax.train --gin_file=configs/quickstart.gin --run_dir=runs/quickstart

Change one setting:  --gin_binding='Run.steps = 100'
List settings:       --gin_names=Method

RUN_DIR then holds metrics.jsonl, curves.png, samples/ (trajectories to read), checkpoints/, summary.json and config.gin.
"""

from pathlib import Path

from cipo_jax import cli
from cipo_jax.training.loop import Run, train
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import open_run_dir


def main(run_dir: Path) -> None:
    train(Run(), lambda: open_run_dir(run_dir, may_change=("Progress.*",)), Progress())


if __name__ == "__main__":
    cli.run(main, run_dir=True)
