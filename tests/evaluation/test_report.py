import json

import numpy as np
import pytest
from rich.console import Console

from cipo_jax.evaluation import report
from cipo_jax.evaluation.statistics import wilson

CONFLICT = {
    "episodes": 600.0,
    "em": 0.25,
    "f1": 0.26,
    "searches": 1.9,
    "conflict_episodes": 590.0,
    "prior_driven": 0.4,
    "evidence_driven": 0.3,
    "other": 0.25,
    "malformed": 0.05,
}
AGREE = {"episodes": 150.0, "em": 0.9, "f1": 0.9, "searches": 2.0}


def test_summary_has_the_promised_keys_in_order(tmp_path):
    after = {**CONFLICT, "em": 0.75, "prior_driven": 0.05}
    summary = report.make_summary(
        method="cipo",
        seed=1,
        steps=40,
        wall_s=310.5,
        params=650_000,
        compiles_after_warmup=0,
        before=CONFLICT,
        after=after,
        strata={"agree": AGREE},
    )
    got = json.loads(report.write_summary(tmp_path / "summary.json", summary).read_text())
    assert list(got)[:8] == [
        *("method", "seed", "steps", "wall_s", "params", "compiles_after_warmup", "before", "after")
    ]
    keys = ["em", "f1", "prior_driven", "evidence_driven", "other", "malformed", "searches"]
    assert list(got["before"]) == list(got["after"]) == keys
    assert (got["before"]["em"], got["after"]["em"], got["after"]["searches"]) == (0.25, 0.75, 1.9)
    assert got["intervals"]["after"]["em"] == pytest.approx([wilson(0.75, 600).low, wilson(0.75, 600).high])
    assert got["intervals"]["before"]["prior_driven"] == pytest.approx([wilson(0.4, 590).low, wilson(0.4, 590).high])
    assert got["strata"]["agree"]["em"] == 0.9


def test_summary_writes_undefined_values_as_null(tmp_path):
    summary = report.make_summary(
        method="cipo", seed=0, steps=0, wall_s=1.0, params=1, compiles_after_warmup=0, before=AGREE, after=AGREE
    )
    summary |= {"bad": float("nan"), "array": np.float32(0.5), "nested": [{"x": float("inf")}]}
    got = json.loads(report.write_summary(tmp_path / "s.json", summary).read_text())
    assert got["before"]["prior_driven"] is None
    assert got["bad"] is None and got["nested"] == [{"x": None}] and got["array"] == 0.5


def rendered(table, width=80):
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_table_fits_80_columns_and_shows_the_numbers():
    misleading = {**CONFLICT, "misled": 0.25}
    strata = {"conflict": CONFLICT, "agree": AGREE, "misleading": misleading}
    after = {**strata, "conflict": {**CONFLICT, "em": 0.75}, "misleading": {**misleading, "misled": 0.125}}
    table = report.results_table(
        {"before": strata, "after": after, "oracle": strata, "memory": strata}, closed_book=(wilson(0.6, 120),) * 2
    )
    text = rendered(table)
    assert "…" not in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("conflict 600"))
    assert row.split() == ["conflict", "600", "before", ".25", "[.22", ".29]", ".40", ".30", ".25", ".05", "1.90"]
    row = next(line for line in lines if line.startswith("agree 150"))
    assert row.split()[-5:] == ["-", "-", "-", "-", "2.00"]
    assert "misled 0.25 before, 0.12 after" in text
    assert any(line.startswith("no passages 120") and ".60 [.51 .68]" in line for line in lines)


def test_table_without_scripted_agents():
    text = rendered(report.results_table({"before": {"conflict": CONFLICT}, "after": {"conflict": CONFLICT}}))
    assert "oracle" not in text and "no passages" not in text
