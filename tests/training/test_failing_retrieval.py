"""A training run goes on whatever its retrieval service does, and counts what failed."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import failing_run
from bad_server import Server
from tiny_run import last_step

from cipo_jax.training.metrics import read_metrics

LIMIT_S = 240
BAD = ("error500", "html", "cut", "silent", "hang_up", "drop", "not_http")
DIES_AFTER = 4  # steps, and not before everything else has happened


class FailingServer(Server):
    """Every second request goes wrong, each time in another way; late in the run the server dies."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._cycle = itertools.cycle(kind for bad in BAD for kind in (bad, "good"))
        super().__init__("good")

    def next_behaviour(self) -> str:
        done = set(BAD) <= set(self.served) and last_step(self._run_dir) >= DIES_AFTER
        return "die" if done else next(self._cycle)


def test_training_goes_on_and_counts_the_failures(tmp_path, repository):
    run_dir = tmp_path / "run"
    server = FailingServer(run_dir)
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    try:
        done = subprocess.run(
            [sys.executable, failing_run.__file__, str(run_dir), server.url],
            env=environment | {"PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stderr
    records = read_metrics(run_dir / "metrics.jsonl")
    print(done.stdout, done.stderr, *records, sep="\n")  # shown where the test fails
    assert set(server.served) == {"good", *BAD, "die"}
    steps = [r for r in records if "reward" in r]
    assert [r["step"] for r in steps] == list(range(1, failing_run.STEPS + 1))
    assert all(r["skipped_updates"] == 0 and "nonfinite" not in r for r in steps)
    alive, dead = steps[:DIES_AFTER], steps[-1:]
    assert 0 < sum(r["retrieval_errors"] for r in alive) < sum(r["queries"] for r in alive)
    assert all(r["retrieval_errors"] == r["queries"] > 0 for r in dead)
    assert max(r["retrieval_seconds"] for r in steps) < 10 * failing_run.TIMEOUT_S  # nobody waits for the silent one
    assert all(0 <= r["retrieval_share"] < 1 for r in steps) and any(r["retrieval_share"] for r in steps)
    assert "a search failed (" in done.stderr
