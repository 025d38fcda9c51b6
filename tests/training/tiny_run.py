"""Quickstart runs made tiny, as processes that can be stopped and killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cipo_jax.models.config import DecoderConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DECODER = DecoderConfig(vocab_size=960, width=32, depth=1, heads=2, kv_heads=2, head_dim=16, ffn=64, rope_theta=10000.0)
STEPS, EVERY, WARM, WARM_EVERY = 24, 8, (60, 20), 30
BINDINGS = (
    *(f"DecoderConfig.{name} = {getattr(DECODER, name)}" for name in ("width", "depth", "heads", "kv_heads")),
    *(f"DecoderConfig.{name} = {getattr(DECODER, name)}" for name in ("head_dim", "ffn")),
    f"WarmStartConfig.steps = {WARM}",
    f"WarmStartConfig.checkpoint_every = {WARM_EVERY}",
    "WarmStartConfig.batch = 16",
    "warm_start/adamw.learning_rate = 1e-2",
    "WarmStartMix.copying = 120",
    "WarmStartMix.mixture = 40",
    f"Run.steps = {STEPS}",
    f"Run.eval_every = {EVERY}",
    "Run.eval_batch = 8",
    "Run.sample_count = 2",
    "Method.questions = 4",
    "Method.samples = 2",
    # Every step moves the parameters, also where no trajectory of so small a policy is rewarded.
    "AdvantageConfig.skip_zero_groups = False",
    "ClippedObjective.entropy_weight = 0.01",
    "SyntheticTask.warm_start_worlds = 2",
    "SyntheticTask.rl_worlds = 2",
    "SyntheticTask.validation_questions = 8",
    "SyntheticTask.conflict_questions = 8",
    "SyntheticTask.stratum_questions = 4",
)


def arguments(run_dir: Path, *bindings: str, gin_file: str = "configs/quickstart.gin") -> list[str]:
    """Flags of a tiny run; `bindings` come after the tiny ones and win."""
    return [
        f"--gin_file={gin_file}",
        f"--run_dir={run_dir}",
        *(f"--gin_binding={binding}" for binding in (*BINDINGS, *bindings)),
    ]


def start(module: str, flags: Sequence[str], output: Path) -> subprocess.Popen:
    """Starts `python -m cipo_jax.<module>` on one device; stdout and stderr are appended to a file."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    with open(output, "a") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", f"cipo_jax.{module}", *flags],
            cwd=REPOSITORY,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def wait_until(process: subprocess.Popen, seen: Callable[[], bool], what: str) -> None:
    """Returns as soon as `seen`; fails if the process ends before."""
    while not seen():
        assert process.poll() is None, f"it ended with code {process.returncode} before {what}"
        time.sleep(0.002)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL."""
    process.kill()
    process.wait()


def names(folder: Path) -> list[str]:
    """What a folder holds; nothing when it is absent."""
    return os.listdir(folder) if folder.is_dir() else []


def last_step(run_dir: Path) -> int:
    """The last RL step in the metrics, 0 without any."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a line without its end is left out
    return next((json.loads(line)["step"] for line in reversed(lines) if b'"reward"' in line), 0)
