"""The comparison's bookkeeping, numbers and pictures, with arms whose results are known."""

import dataclasses
import json
import math

import gin
import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from cipo_jax import compare
from cipo_jax.errors import UserError
from cipo_jax.evaluation import compare_report
from cipo_jax.evaluation.compare import ArmRunner, Comparison, analyse, load_results, run_comparison
from cipo_jax.evaluation.statistics import holm

SMALL = Comparison(arms=("outcome", "cipo"), stales=(0.1, 0.0), seeds=(0, 1, 2))


class Arms:
    """Counts its calls; prior_driven is .30 + seed/100, less .10, .12, .14 (by seed) for cipo."""

    def __init__(self, fail_at=None):
        self.calls, self.warm_starts, self.fail_at = [], [], fail_at

    def warm_start(self, seed, directory):
        self.warm_starts.append(seed)
        (directory / "weights").write_text(str(seed))

    def run(self, arm, seed, stale, warm_start):
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt
        self.calls.append((seed, stale, arm))
        assert (warm_start / "weights").read_text() == str(seed)
        prior = 0.30 + seed / 100 - (0.10 + 0.02 * seed if arm == "cipo" else 0.0)
        return {
            "prior_driven": np.float32(prior),
            "em": 0.7,
            "malformed": 0.0,
            "searches": 2,
            "before": {"prior_driven": 0.5 + seed / 10, "em": 0.2},
        }


def run(directory, arms, comparison=SMALL):
    return run_comparison(directory, comparison, ArmRunner(arms.warm_start, arms.run), say=lambda line: None)


def test_whole_seeds_first_and_one_warm_start_a_seed(tmp_path):
    arms = Arms()
    run(tmp_path, arms)
    assert arms.warm_starts == [0, 1, 2]
    assert arms.calls[:4] == [(0, 0.1, "outcome"), (0, 0.1, "cipo"), (0, 0.0, "outcome"), (0, 0.0, "cipo")]
    assert len(arms.calls) == len(set(arms.calls)) == 12


def test_interrupted_study_continues_where_it_stopped(tmp_path):
    first = Arms(fail_at=5)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    second = Arms()
    analysis = run(tmp_path, second)
    assert second.calls[0] == (1, 0.1, "cipo")  # the one that was cut
    assert second.warm_starts == [2]
    assert sorted(first.calls + second.calls) == sorted(SMALL.cells())
    whole = run(tmp_path / "whole", Arms())
    assert json.dumps(analysis) == json.dumps(whole)
    third = Arms()
    run(tmp_path, third)
    assert third.calls == third.warm_starts == []


def test_warm_start_cut_in_the_middle_is_called_again(tmp_path):
    arms = Arms()

    def cut(seed, directory):
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_comparison(tmp_path, SMALL, ArmRunner(cut, arms.run))
    run(tmp_path, arms)
    assert arms.warm_starts == [0, 1, 2]


def test_seeds_may_be_added_but_the_endpoint_may_not_change(tmp_path):
    run(tmp_path, Arms())
    more = Arms()
    analysis = run(tmp_path, more, dataclasses.replace(SMALL, seeds=(0, 1, 2, 3)))
    assert {seed for seed, _, _ in more.calls} == {3}
    assert analysis["stale"]["0.1"]["arms"]["cipo"]["em"]["n"] == 4
    with pytest.raises(UserError, match=r"endpoint='prior_driven'.*'em'"):
        run(tmp_path, Arms(), dataclasses.replace(SMALL, endpoint="em"))


def test_paired_differences_by_hand(tmp_path):
    analysis = run(tmp_path, Arms())
    part = analysis["stale"]["0.1"]
    assert analysis["complete"] is True
    # Differences cipo - outcome: -.10, -.12, -.14: mean -.12, sd .02, se .02/sqrt(3), t(.975, 2) = 4.302653.
    got = part["differences"]["outcome"]["prior_driven"]
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert (got["mean"], got["std"], got["low"], got["high"]) == pytest.approx(
        (-0.12, 0.02, -0.12 - half, -0.12 + half), abs=1e-6
    )
    # t = .12 / (.02 / sqrt 3) = 10.3923; two-sided p with 2 degrees of freedom is 1 - t / sqrt(t^2 + 2).
    p = 1 - 10.392305 / math.sqrt(108 + 2)
    assert got["p"] == pytest.approx(p, rel=1e-4)
    assert got["p_holm"] == pytest.approx(2 * p, rel=1e-4)  # two stales in the family
    assert part["arms"]["outcome"]["prior_driven"]["mean"] == pytest.approx(0.31)
    assert part["before"]["prior_driven"]["mean"] == pytest.approx(0.6)
    assert part["differences"]["outcome"]["em"]["p"] == 1.0
    assert "cipo" not in part["differences"]


def test_unfinished_study_pairs_only_what_both_arms_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Arms(fail_at=5))
    analysis = analyse(load_results(tmp_path, SMALL), SMALL)
    part = analysis["stale"]["0.1"]
    assert analysis["complete"] is False
    assert (part["arms"]["outcome"]["em"]["n"], part["arms"]["cipo"]["em"]["n"]) == (2, 1)
    assert part["differences"]["outcome"]["em"]["n"] == 1
    compare_report.write_report(tmp_path, analysis, SMALL)  # one pair: no interval, no p
    assert "Unfinished" in (tmp_path / "table.md").read_text()


def test_missing_metric_is_named_and_leaves_no_result(tmp_path):
    arms = Arms()
    with pytest.raises(ValueError, match=r"arm 'outcome', seed 0, stale 0\.1: no value for 'prior_driven'"):
        run_comparison(
            tmp_path, SMALL, ArmRunner(arms.warm_start, lambda *_: {"em": 0.5, "prior_driven": float("nan")})
        )
    assert load_results(tmp_path, SMALL) == []


@pytest.mark.parametrize("change", [{"reference": "igpo"}, {"seeds": ()}, {"stales": (0.1, 0.1)}])
def test_nonsense_is_refused(change):
    with pytest.raises(UserError):
        dataclasses.replace(SMALL, **change)


def test_report_holds_every_number(tmp_path):
    analysis = run(tmp_path, Arms())
    compare_report.write_report(tmp_path, analysis, SMALL)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[2] == "### stale 0.1 (3 seeds)"
    cells = [cell.strip() for cell in lines[8].split("|")[1:-1]]
    assert cells[0] == "cipo" and cells[5:] == ["", "", ""]
    cells = [cell.strip() for cell in lines[7].split("|")[1:-1]]
    assert cells[0] == "outcome" and cells[1].startswith("0.310 [0.285") and cells[2] == "0.700 [0.700, 0.700]"
    assert cells[5] == "-0.120 [-0.170, -0.070]" and cells[6:] == ["0.009", "0.018"]
    assert lines[6].startswith("| warm start | 0.600 [")
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved["stale"]["0"]["arms"]["cipo"]["prior_driven"]["values"]["2"] == pytest.approx(0.18)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in compare_report.tables(analysis, SMALL):
        console.print(table)
    assert "-.12 [-.17 -.07]" in console.export_text()


def test_picture_shows_every_seed(tmp_path):
    """A seed's value moves ink in the picture, so each is drawn."""
    analysis = run(tmp_path, Arms())
    paths = []
    for seed in ("none", "0", "1", "2"):
        changed = json.loads(json.dumps(analysis))
        if seed != "none":
            changed["stale"]["0"]["arms"]["cipo"]["em"]["values"][seed] -= 0.1
        paths.append(compare_report.plot_comparison(changed, SMALL, tmp_path / f"{seed}.png"))
    images = [matplotlib.image.imread(path) for path in paths]
    assert images[0].shape[0] > 500
    assert all(image.shape != images[0].shape or (image != images[0]).any() for image in images[1:])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, math.nan])[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(holm([0.01, math.nan])[1])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_command_runs_reports_and_resumes(tmp_path, clean_gin, capsys):
    """The program without its process: gin, run directory, study, report."""
    calls = []

    def fake_warm_start(seed, directory):
        calls.append(("warm", seed))

    def fake_arm(arm, seed, stale, directory, offset=0.0):
        calls.append((arm, seed))
        em = offset + seed / 10
        return {"prior_driven": 1 - em, "em": em, "malformed": 0.0, "searches": 2.0}

    for function in (fake_warm_start, fake_arm):
        if f"compare_test.{function.__name__}" not in gin.config._REGISTRY:
            gin.external_configurable(function, module="compare_test")
    settings = (
        "ArmRunner.make_warm_start = @fake_warm_start",
        "ArmRunner.run_arm = @fake_arm",
        "fake_arm.offset = 0.5",
        "Comparison.arms = ('outcome', 'cipo')",
        "Comparison.stales = (0.0,)",
    )

    def call(*more):
        gin.clear_config()
        gin.parse_config([*settings, *more])
        calls.clear()
        compare.main(tmp_path / "run")
        return capsys.readouterr().out

    call("Comparison.seeds = (0, 1)")
    assert calls == [("warm", 0), ("outcome", 0), ("cipo", 0), ("warm", 1), ("outcome", 1), ("cipo", 1)]
    assert {"table.md", "comparison.png", "comparison.json"} <= {p.name for p in (tmp_path / "run").iterdir()}
    out = call("Comparison.seeds = (0, 1, 2)")
    assert calls == [("warm", 2), ("outcome", 2), ("cipo", 2)]
    assert "stale 0 (3 seeds)" in out and ".40 [.15 .65]" in out  # .5, .4, .3: .4 -+ 4.302653 * .1 / sqrt 3
    with pytest.raises(UserError, match="another experiment"):
        call("Comparison.seeds = (0, 1, 2)", "fake_arm.offset = 0.4")
