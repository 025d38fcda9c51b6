"""A tiny run of the main job: what it leaves, and that killing or stopping it anywhere changes nothing in the end."""

import dataclasses
import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from tiny_run import EVERY, STEPS, WARM, WARM_EVERY, kill, last_step, names, start, wait_until

from cipo_jax.distributed.mesh import mesh
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.learning.state import adamw
from cipo_jax.training.checkpoints import Checkpoints, abstract_like
from cipo_jax.training.metrics import read_metrics
from cipo_jax.training.policy import Learner, Policy

TIMES = {
    "rollout_s",
    "scoring_s",
    "step_s",
    "tokens_per_s",
    "retrieval_seconds",
    "retrieval_wait_seconds",
    "retrieval_busy_seconds",
    "retrieval_share",
}


@dataclasses.dataclass
class Tried:
    """A finished run.

    Attributes:
      path: its directory.
      output: what it printed, all parts of it.
      notes: what was seen when it was interrupted.
    """

    path: Path
    output: str
    notes: dict


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Tried:
    """A run that nobody disturbed."""
    path, output = tmp_path_factory.mktemp("whole") / "run", tmp_path_factory.mktemp("output") / "whole"
    code = start("train", tiny_run.arguments(path), output).wait(600)
    assert code == 0, output.read_text()
    return Tried(path, output.read_text(), {})


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory) -> Tried:
    """The same run, killed three times, stopped once, and started again by the same command each time."""
    path, output = tmp_path_factory.mktemp("interrupted") / "run", tmp_path_factory.mktemp("output") / "interrupted"
    folder, notes = path / "checkpoints", {}

    def again():
        return start("train", tiny_run.arguments(path), output)

    def complete():
        return sorted(int(name) for name in names(folder) if name.isdigit())

    process = again()
    wait_until(process, lambda: str(WARM_EVERY) in names(path / "warm_start"), "a checkpoint of the warm start")
    kill(process)
    notes["warm_start"] = names(path / "warm_start")

    for step in range(2 * EVERY, STEPS + 1, EVERY):  # a write may be over before the signal arrives: try the next
        process = again()
        wait_until(process, lambda n=step: any(x.startswith(f"{n}.") for x in names(folder)), f"checkpoint {step}")
        kill(process)
        notes["write"] = (step, names(folder))
        if step not in complete():
            break
    before = complete()[-1]

    process = again()
    wait_until(process, lambda: last_step(path) == before + 1, "a step after the restart")
    wait_until(process, lambda: last_step(path) >= before + 3, "a few more")
    kill(process)
    notes["middle"] = (before, complete(), last_step(path))

    process = again()
    wait_until(process, lambda: last_step(path) == before + 1, "a step after the restart")
    process.send_signal(signal.SIGTERM)
    notes["sigterm"] = (process.wait(300), complete(), last_step(path), (path / "summary.json").exists())

    code = again().wait(600)
    assert code == 0, output.read_text()
    return Tried(path, output.read_text(), notes)


def test_interruptions_hit_what_they_aimed_at(interrupted):
    notes = interrupted.notes
    assert str(WARM_EVERY) in notes["warm_start"] and str(sum(WARM)) not in notes["warm_start"]
    step, left = notes["write"]
    assert str(step) not in left and any(name.startswith(f"{step}.") for name in left)
    before, complete, last = notes["middle"]
    assert complete[-1] == before and before + 3 <= last < STEPS


def test_sigterm_saves_and_ends_with_code_0(interrupted):
    before = interrupted.notes["middle"][0]
    code, complete, last, summary = interrupted.notes["sigterm"]
    assert code == 0 and not summary
    assert before < complete[-1] == last < STEPS
    said = f"stopped after step {last}; run the same command to continue"
    assert said in interrupted.output
    assert f"continuing after step {last}" in interrupted.output.split(said)[1]


def test_final_state_equals_an_undisturbed_run_bit_for_bit(whole, interrupted):
    policy = Policy(tiny_run.DECODER, mesh(devices=jax.devices()[:1]))
    state = Learner(policy, ClippedObjective(), adamw()).init(policy.init(0))
    first = state.params
    with (
        Checkpoints(whole.path / "checkpoints", read_only=True) as a,
        Checkpoints(interrupted.path / "checkpoints", read_only=True) as b,
    ):
        assert a.latest_step == b.latest_step == STEPS
        assert a.best_step == b.best_step
        for step in {STEPS, a.best_step}:
            there, here = (x.restore(abstract_like(state), step)[0] for x in (a, b))
            for (name, x), y in zip(jax.tree_util.tree_leaves_with_path(there), jax.tree.leaves(here)):
                np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(name))
        moved = jax.tree.map(lambda x, y: bool((x != y).any()), first, there.params)
        assert all(jax.tree.leaves(moved))
        assert int(a.restore(abstract_like(state), STEPS)[0].step) == 2 * STEPS


def test_metrics_of_an_interrupted_run_have_each_step_once_and_the_same_values(whole, interrupted):
    def kept(run):
        return [
            {name: x for name, x in line.items() if name not in TIMES}
            for line in read_metrics(run.path / "metrics.jsonl")
        ]

    undisturbed, disturbed = kept(whole), kept(interrupted)
    assert [line["step"] for line in disturbed if "reward" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in disturbed if "reward" not in line] == list(range(0, STEPS + 1, EVERY))
    for a, b in zip(undisturbed, disturbed, strict=True):
        assert a == b
    steps = [line for line in undisturbed if "reward" in line]
    assert all(line["grad_norm"] > 0 and line["skipped_updates"] == line["empty_updates"] == 0 for line in steps)


def test_nothing_compiles_after_warm_up(whole, interrupted):
    for run in (whole, interrupted):
        steps = [line for line in read_metrics(run.path / "metrics.jsonl") if "reward" in line]
        assert [line["compiles_after_warmup"] for line in steps] == [0] * STEPS
        assert json.loads((run.path / "summary.json").read_text())["compiles_after_warmup"] == 0


def test_summary_holds_what_is_promised(whole, interrupted):
    summary = json.loads((whole.path / "summary.json").read_text())
    promised = ["method", "seed", "steps", "wall_s", "params", "compiles_after_warmup", "before", "after"]
    assert list(summary)[: len(promised)] == promised
    shares = {"em", "f1", "prior_driven", "evidence_driven", "other", "malformed", "searches"}
    assert set(summary["before"]) == set(summary["after"]) == shares
    assert (summary["method"], summary["seed"], summary["steps"]) == ("cipo", 0, STEPS)
    assert summary["params"] == Policy(tiny_run.DECODER, mesh(devices=jax.devices()[:1])).size
    other = json.loads((interrupted.path / "summary.json").read_text())
    assert other.pop("wall_s") > 0 and summary.pop("wall_s") > 0
    assert other == summary


def test_files_for_people_are_there(whole):
    assert {"config.gin", "operative_config.gin", "curves.png", "metrics.jsonl", "samples", "summary.json"} <= set(
        names(whole.path)
    )
    assert len(names(whole.path / "samples")) == 1 + STEPS // EVERY
    assert (whole.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in ("summary.json", "metrics.jsonl", "curves.png", "samples", "checkpoints"):
        assert f"  {whole.path / name}\n" in whole.output
    assert "error" not in whole.output.lower()


def test_a_finished_run_is_only_reported_again(whole, tmp_path):
    before = (whole.path / "metrics.jsonl").read_bytes()
    assert start("train", tiny_run.arguments(whole.path), tmp_path / "output").wait(600) == 0
    assert (whole.path / "metrics.jsonl").read_bytes() == before


def test_another_experiment_is_refused_and_nothing_changes(whole, tmp_path):
    def state():
        return {p.relative_to(whole.path): p.stat().st_mtime_ns for p in whole.path.rglob("*") if p.is_file()}

    before = state()
    process = start("train", tiny_run.arguments(whole.path, "Run.steps = 7"), tmp_path / "output")
    assert process.wait(300) == 2
    told = (tmp_path / "output").read_text()
    assert told == (
        f"error: --run_dir {whole.path} holds another experiment (Run.steps is {STEPS} there and 7 here); choose another "
        "directory, or the settings it was started with to continue it.\n"
    )
    lock = Path(".lock")
    assert {name: time for name, time in state().items() if name != lock} == {
        name: time for name, time in before.items() if name != lock
    }
