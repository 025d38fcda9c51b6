"""The learning curves of a run as one picture."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cipo_jax.errors import UserError
from cipo_jax.training.metrics import read_metrics

# Colour-blind safe (Okabe and Ito); a quantity keeps its colour in every panel.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small plot.

    Attributes:
      title: What it shows, with its unit.
      lines: Metric names with label and colour.
      bounded: Whether the values are shares, so that the axis runs from 0 to 1.
    """

    title: str
    lines: tuple[tuple[str, str, str], ...]
    bounded: bool = False


PANELS = (
    Panel("Reward of the outcome", (("reward", "reward", _BLUE), ("f1", "F1", _GREEN)), True),
    Panel("Exact match", (("em", "EM", _BLUE),), True),
    Panel(
        "Conflict questions: share of answers",
        (
            ("prior_driven", "prior-driven", _RED),
            ("evidence_driven", "evidence-driven", _GREEN),
            ("other", "other", _GREY),
            ("malformed", "malformed", _PURPLE),
        ),
        True,
    ),
    Panel("EALR (nats per token)", (("ealr", "EALR", _BLUE),)),
    Panel("Searches per trajectory", (("searches", "searches", _BLUE),)),
    Panel("KL to the initial policy (nats per token)", (("kl_k3", "k3", _BLUE), ("kl_k1", "k1", _GREY))),
    Panel("Length (tokens)", (("response_tokens", "sampled", _BLUE), ("total_tokens", "in all", _ORANGE))),
    Panel("Entropy (nats per token)", (("entropy", "entropy", _BLUE),)),
    Panel("Speed (tokens per second)", (("tokens_per_s", "tokens/s", _BLUE),)),
)
VALIDATION = "validation/"


def plot_curves(
    metrics: str | os.PathLike | Sequence[Mapping[str, Any]],
    path: str | os.PathLike,
    *,
    title: str = "",
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """Draws small multiples of a run's metrics against the update step.

    A thin line is the raw value of each training batch, a strong one its running mean; dots joined by a dashed line
    are greedy evaluations on the validation split (names that start with `validation/`). Panels without data are left
    out.

    Args:
      metrics: A `metrics.jsonl`, or its records.
      path: The PNG to write; it replaces an earlier one in one step.
      title: Heading of the picture.
      panels: What to draw.

    Returns:
      `path`.

    Raises:
      UserError: No record holds a metric of any panel.
    """
    records = read_metrics(metrics) if isinstance(metrics, str | os.PathLike) else list(metrics)
    drawn = [
        panel
        for panel in panels
        if any(_series(records, prefix + name)[0] for prefix in ("", VALIDATION) for name, _, _ in panel.lines)
    ]
    if not drawn:
        raise UserError(
            f"{metrics if isinstance(metrics, str | os.PathLike) else 'The records'} hold no metric to plot."
        )
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    if title:
        figure.suptitle(title)
    for panel, axis in zip(drawn, axes.flat):
        _draw(axis, panel, records)
    for axis in axes.flat[len(drawn) :]:
        axis.set_axis_off()
    for axis in list(axes.flat)[len(drawn) - columns : len(drawn)]:  # the lowest of each column
        axis.set_xlabel("step")
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=110)
    os.replace(temporary, path)
    return path


def _draw(axis: Any, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    labelled = 0
    for name, label, colour in panel.lines:
        steps, values = _series(records, name)
        if steps:
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
            axis.plot(steps, _running_mean(values), color=colour, linewidth=1.8, label=label)
            labelled += 1
        steps, values = _series(records, VALIDATION + name)
        if steps:
            axis.plot(
                steps,
                values,
                color=colour,
                linewidth=1,
                linestyle="--",
                marker="o",
                markersize=4,
                label=f"{label}, validation",
            )
            labelled += 1
    axis.set_title(panel.title, fontsize=9.5, loc="left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.tick_params(labelsize=8)
    if panel.bounded:
        axis.set_ylim(-0.02, 1.02)
    else:
        axis.margins(y=0.15)
    if labelled > 1:
        axis.legend(fontsize=6.5, framealpha=0.6, edgecolor="none", loc="best", ncols=2)


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that hold a number under `name`, ordered by step."""
    pairs = [
        (record["step"], float(record[name]))
        for record in records
        if "step" in record and isinstance(record.get(name), int | float) and not isinstance(record[name], bool)
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [step for step, _ in pairs], [value for _, value in pairs]


def _running_mean(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential running mean, corrected for its start: the first values count fully."""
    means, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        means.append(total / norm)
    return means
