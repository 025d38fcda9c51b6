"""The end of a run: one table for people and `summary.json` for programs."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from cipo_jax.evaluation.statistics import Estimate, wilson
from cipo_jax.training.run_dir import write_atomic

SUMMARY_METRICS = ("em", "f1", "prior_driven", "evidence_driven", "other", "malformed", "searches")
_COLUMNS = {  # headings broken so that the table fits 80 columns
    "em": "EM [95 %]",
    "f1": "F1",
    "prior_driven": "prior-\ndriven",
    "evidence_driven": "evid.-\ndriven",
    "other": "other",
    "malformed": "mal-\nformed",
    "malformed_all": "mal-\nformed",
    "searches": "sear-\nches",
}
_PLAIN = ("f1", "malformed_all")  # shown where behaviour cannot be judged
_SCRIPTED = ("oracle", "memory")
_OVER_CONFLICT = ("prior_driven", "evidence_driven", "other", "malformed")

Metrics = Mapping[str, float]  # what behaviour.summarise returns


def make_summary(
    *,
    method: str,
    seed: int,
    steps: int,
    wall_s: float,
    params: int,
    compiles_after_warmup: int,
    before: Metrics,
    after: Metrics,
    **extra: Any,
) -> dict[str, Any]:
    """What `summary.json` holds.

    Args:
      method: name of the method.
      seed: of the run.
      steps: updates made.
      wall_s: seconds from start to end, resumed parts included.
      params: parameters of the policy.
      compiles_after_warmup: compilations after warm-up; 0 in a sound run.
      before, after: `summarise` on the reported conflict questions. The summary holds `SUMMARY_METRICS` of them, None
        where undefined, then `intervals` (95 %, Wilson) of its shares.
      **extra: further entries, placed last.
    """
    out: dict[str, Any] = {"method": method, "seed": seed, "steps": steps, "wall_s": wall_s, "params": params}
    out["compiles_after_warmup"] = compiles_after_warmup
    for name, metrics in (("before", before), ("after", after)):
        out[name] = {key: metrics.get(key) for key in SUMMARY_METRICS}
    out["intervals"] = {
        name: {key: [e.low, e.high] for key, e in share_intervals(metrics).items()}
        for name, metrics in (("before", before), ("after", after))
    }
    return out | extra


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> Path:
    """Writes a summary as JSON, in one step; values that are not finite become null."""
    write_atomic(path, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
    return Path(path)


def share_intervals(metrics: Metrics) -> dict[str, Estimate]:
    """Wilson intervals of EM (over all episodes) and of the behaviour shares (over conflict episodes)."""
    counts = {"em": metrics.get("episodes", 0)} | dict.fromkeys(_OVER_CONFLICT, metrics.get("conflict_episodes", 0))
    return {name: wilson(metrics[name], round(n)) for name, n in counts.items() if name in metrics}


def results_table(
    agents: Mapping[str, Mapping[str, Metrics]],
    *,
    closed_book: tuple[Estimate, Estimate] | None = None,
    title: str = "Reported questions",
) -> Table:
    """The table at the end of a run or of an evaluation.

    Args:
      agents: `summarise` by agent and stratum, in the order of the rows; "before" and "after" of a run, "oracle" and
        "memory" for the scripted ceiling and floor.
      closed_book: EM on the memory world with nothing retrieved, before and after.
      title: heading.

    Returns:
      A table of at most 80 columns. A stratum's row names its number of questions. Columns without a value are left out.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.title_justify = table.caption_justify = "left"
    table.title_style, table.caption_style = "bold", "dim"
    table.add_column("questions", no_wrap=True)
    table.add_column("agent", no_wrap=True)
    agents = {name: strata for name, strata in agents.items() if strata}
    known = {name for strata in agents.values() for metrics in strata.values() for name in metrics}
    columns = [name for name in _COLUMNS if name in known and not ("prior_driven" in known and name in _PLAIN)]
    for name in columns:
        table.add_column(_COLUMNS[name], justify="right", no_wrap=True)
    for stratum, first in next(iter(agents.values())).items():
        label = f"{stratum} {first.get('episodes', 0):.0f}"
        for agent, metrics in agents.items():
            if stratum in metrics:
                table.add_row(label, agent, *_cells(columns, metrics[stratum]), style=_style(agent))
                label = ""
        table.add_section()
    if closed_book:
        for agent, estimate in zip(("before", "after"), closed_book):
            label = f"no passages {estimate.n}" if agent == "before" else ""
            table.add_row(label, agent, Text(short(estimate.text())), *[""] * (len(columns) - 1), style=_style(agent))
    table.caption = _caption(agents, closed_book=bool(closed_book))
    return table


def _caption(agents: Mapping[str, Mapping[str, Metrics]], *, closed_book: bool) -> str:
    lines = []
    policies = {name: strata for name, strata in agents.items() if name not in _SCRIPTED}
    for stratum in next(iter(agents.values())):
        misled = [
            f"{strata[stratum]['misled']:.2f} {name}"
            for name, strata in policies.items()
            if "misled" in strata.get(stratum, {})
        ]
        if misled:
            lines.append(f"{stratum}: misled {', '.join(misled)}")
    if any(name in agents for name in _SCRIPTED):
        lines.append("oracle, memory: scripted agents that follow the passages / answer from memory")
    if closed_book:
        lines.append("no passages: questions on the memory world, searches come back empty")
    return "\n".join(lines)


def _cells(columns: Sequence[str], metrics: Metrics) -> list[Text]:
    """Text objects, so that the brackets of an interval are not read as rich markup."""
    cells = []
    for name in columns:
        if name not in metrics:
            cells.append(Text("-"))
        else:
            cells.append(Text(short(share_intervals(metrics)["em"].text() if name == "em" else f"{metrics[name]:.2f}")))
    return cells


def short(text: str) -> str:
    """`.65 [.61 .69]` for `0.65 [0.61, 0.69]`, where columns are scarce."""
    return re.sub(r"(?<!\d)0\.", ".", text).replace(",", "")


def _style(agent: str) -> str:
    return "dim" if agent in _SCRIPTED else "bold" if agent == "after" else ""


def finite(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinity become None, numpy scalars numbers, keys text."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
