"""A comparison for people: one table with intervals and one picture."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from cipo_jax.evaluation.compare import Comparison
from cipo_jax.evaluation.report import finite, short
from cipo_jax.evaluation.statistics import Estimate
from cipo_jax.training.run_dir import write_atomic

NOTE = (
    "Means over seeds with 95 % intervals (Student's t). Differences are paired by seed; p is the paired t-test's, "
    "and Holm's adjusts it over all arms and stales."
)
# Colour-blind safe (Okabe and Ito).
_COLOURS = ("#777777", "#E69F00", "#0072B2", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")


def write_report(directory: str | Path, analysis: Mapping[str, Any], comparison: Comparison) -> list[Path]:
    """Writes `comparison.json`, `table.md` and `comparison.png`; returns their paths."""
    directory = Path(directory)
    paths = [directory / name for name in ("comparison.json", "table.md", "comparison.png")]
    write_atomic(paths[0], json.dumps(finite(analysis), indent=1, allow_nan=False) + "\n")
    write_atomic(paths[1], markdown(analysis, comparison))
    plot_comparison(analysis, comparison, paths[2])
    return paths


def headings(comparison: Comparison) -> list[str]:
    """The columns of `table_rows`."""
    return ["arm", *comparison.metrics, f"{comparison.reference} - arm: {comparison.endpoint}", "p", "p (Holm)"]


def table_rows(analysis: Mapping[str, Any], comparison: Comparison, stale: float) -> list[list[str]]:
    """One row of texts per arm, after one for the warm start where its metrics are known."""
    part = analysis["stale"][f"{stale:g}"]
    rows = []
    if part["before"]:
        rows.append(["warm start", *(_text(part["before"][name]) for name in comparison.metrics), "", "", ""])
    for arm, metrics in part["arms"].items():
        row = [arm, *(_text(metrics[name]) for name in comparison.metrics)]
        difference = part["differences"].get(arm, {}).get(comparison.endpoint)
        row += [_text(difference), _p(difference["p"]), _p(difference["p_holm"])] if difference else ["", "", ""]
        rows.append(row)
    return rows


def markdown(analysis: Mapping[str, Any], comparison: Comparison) -> str:
    """The table as Markdown, one section per stale."""
    lines = [NOTE if analysis["complete"] else f"Unfinished: some arms have no result yet. {NOTE}", ""]
    columns = headings(comparison)
    for stale in comparison.stales:
        lines += [f"### stale {stale:g} ({_seeds(analysis, stale)} seeds)", ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in table_rows(analysis, comparison, stale)] + [""]
    return "\n".join(lines)


def tables(analysis: Mapping[str, Any], comparison: Comparison) -> list[Table]:
    """The same in 80 columns: two digits, and intervals for the endpoint alone."""
    out = []
    for stale in comparison.stales:
        part = analysis["stale"][f"{stale:g}"]
        title = f"stale {stale:g} ({_seeds(analysis, stale)} seeds)"
        table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        table.add_column("arm")
        for name in (*comparison.metrics, f"{comparison.reference} - arm", "p\n(Holm)"):
            table.add_column(name.replace("_", "_\n") if len(name) > 9 else name, justify="right")
        arms = {"warm start": part["before"]} if part["before"] else {}
        for arm, metrics in (arms | part["arms"]).items():
            difference = part["differences"].get(arm, {}).get(comparison.endpoint)
            cells = [arm, short(_estimate(metrics[comparison.endpoint]).text())]
            cells += [short(f"{metrics[name]['mean']:.2f}") for name in comparison.secondary]
            cells += [short(_estimate(difference).text()), _p(difference["p_holm"])] if difference else ["", ""]
            table.add_row(*map(Text, cells), style="bold" if arm == comparison.reference else "")
        out.append(table)
    return out


def plot_comparison(
    analysis: Mapping[str, Any], comparison: Comparison, path: str | Path, metrics: Sequence[str] | None = None
) -> Path:
    """Draws every seed's value by arm, the values of a seed joined, with means and intervals.

    Args:
      analysis: from `analyse`.
      comparison: what was declared.
      path: the PNG.
      metrics: rows of the picture; the endpoint and the first secondary metric when None. Columns are the stales.
    """
    metrics = list(metrics or comparison.metrics[:2])
    figure = Figure(figsize=(4.6 * len(comparison.stales), 3.1 * len(metrics)), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(metrics), len(comparison.stales), squeeze=False, sharey="row")
    for column, stale in enumerate(comparison.stales):
        for row, name in enumerate(metrics):
            axis = axes[row][column]
            _draw(axis, analysis["stale"][f"{stale:g}"], comparison, name)
            if row == 0:
                axis.set_title(f"stale {stale:g}", fontsize=11)
            if column == 0:
                axis.set_ylabel(name + (" (endpoint)" if name == comparison.endpoint else ""))
            if row + 1 < len(metrics):
                axis.set_xticklabels([])
    figure.supxlabel(
        "thin lines join the arms of a seed; bars are means with 95 % intervals", fontsize=8, color="#555555"
    )
    figure.savefig(path, format="png")
    return Path(path)


def _draw(axis: Any, part: Mapping[str, Any], comparison: Comparison, name: str) -> None:
    place = {arm: i for i, arm in enumerate(comparison.arms)}
    seeds = sorted({seed for arm in part["arms"].values() for seed in arm[name]["values"]}, key=int)
    for seed in seeds:
        points = [(place[arm], m[name]["values"][seed]) for arm, m in part["arms"].items() if seed in m[name]["values"]]
        axis.plot(*zip(*points), color="#bbbbbb", linewidth=0.8, zorder=1)
    for arm, metrics in part["arms"].items():
        x, summary, colour = place[arm], metrics[name], _COLOURS[place[arm] % len(_COLOURS)]
        values = list(summary["values"].values())
        axis.scatter([x] * len(values), values, s=16, color=colour, alpha=0.65, zorder=2, linewidths=0)
        axis.hlines(summary["mean"], x - 0.22, x + 0.22, color=colour, linewidth=2.4, zorder=3)
        if not math.isnan(summary["low"]):
            axis.vlines(x, summary["low"], summary["high"], color=colour, linewidth=1.6, zorder=3)
    if part["before"]:
        axis.axhline(part["before"][name]["mean"], color="#999999", linestyle=":", linewidth=1.2, zorder=0)
        axis.annotate(
            "warm start",
            (1.0, part["before"][name]["mean"]),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
        ).set(fontsize=7, color="#777777")
    axis.set_xticks(range(len(comparison.arms)), [arm.replace("_", "\n") for arm in comparison.arms], fontsize=8)
    axis.set_xlim(-0.6, len(comparison.arms) - 0.4)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _estimate(summary: Mapping[str, Any]) -> Estimate:
    return Estimate(summary["mean"], summary["low"], summary["high"], summary["n"])


def _text(summary: Mapping[str, Any]) -> str:
    return _estimate(summary).text(3)


def _p(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "<0.001"


def _seeds(analysis: Mapping[str, Any], stale: float) -> int:
    part = analysis["stale"][f"{stale:g}"]["arms"]
    return max((next(iter(metrics.values()))["n"] for metrics in part.values()), default=0)
