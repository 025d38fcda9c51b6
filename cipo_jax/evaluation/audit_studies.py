"""Studies of what EALR measures, on any model and transcripts: faithfulness to deletion, and delay."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np
from scipy import stats

from cipo_jax.evaluation.audit import AuditConfig, TranscriptScorer, quantiles
from cipo_jax.evaluation.audit_store import BatchStore
from cipo_jax.evaluation.transcripts import Transcript
from cipo_jax.models.config import DecoderConfig
from cipo_jax.scoring.counterfactuals import EVIDENCE_SPANS, MASK_ROWS, Masked, Removed, Several, Window
from cipo_jax.training.run_dir import write_atomic


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """Masked against removed over the whole grid, and the lag at which evidence first matters.

    Attributes:
      matters: evidence matters to an action from this many nats per token on, of either sign (our choice).
      faithful_difference: a mask is faithful up to this mean absolute difference from deletion, in nats per token ..
      faithful_spearman: .. and from this rank correlation on.
    """

    matters: float = 0.05
    faithful_difference: float = 0.1
    faithful_spearman: float = 0.8


def grid(config: DecoderConfig) -> list[Masked]:
    """Every mask that has a meaning in the model; `gdn_mask` matters to delta layers alone."""
    masks = []
    for rows in MASK_ROWS:
        for span in EVIDENCE_SPANS:
            kinds = ["snapshot"] if not config.delta_layers else ["unmasked"]
            if config.delta_layers and rows == "post_evidence":
                kinds = ["snapshot", "unmasked"]
            masks += [Masked(rows, span, gdn, f"{rows}/{span}/{gdn}") for gdn in kinds]
    return masks


def faithfulness(
    transcripts: Sequence[Transcript],
    model: Any,
    rules: Any,
    tokenizer: Any,
    config: AuditConfig,
    study: Faithfulness,
    progress: Callable[[int], None] = lambda n: None,
    store: BatchStore | None = None,
) -> dict[str, Any]:
    """Runs the study; arguments as of `audit`.

    Returns:
      `{"transitions", "grid": {mask: numbers}, "lag": ..}` and under `"values"` the EALR of every transition by mask.
    """
    masks = grid(model.config)
    removed = {span: Removed(span, f"removed/{span}") for span in EVIDENCE_SPANS}
    later = Window(name="trajectory")
    kinds = Several([*masks, *removed.values(), later])
    scorer = TranscriptScorer(model, rules, tokenizer, config, kinds)
    values: dict[str, dict[tuple, float]] = {kind.name: {} for kind in kinds.counterfactuals}
    by_lag: dict[tuple, dict[int, float]] = {}
    done = 0

    def distil(part, scores, supportive):
        return [[e.kind, e.row, e.turn, e.action - e.turn, e.ealr] for e in scores.effects()]

    for part, _, effects in scorer.kept(transcripts, distil, store):
        for kind, row, turn, lag, ealr in effects:
            key = done + row, turn
            if kind == later.name:
                by_lag.setdefault(key, {})[lag] = ealr
            else:
                values[kind][key] = ealr
        done += len(part)
        progress(len(part))
    del values[later.name]
    numbers = {}
    for mask in masks:
        keys = sorted(values[mask.name].keys() & values[removed[mask.evidence_span].name].keys())
        a = np.asarray([values[mask.name][k] for k in keys])
        b = np.asarray([values[removed[mask.evidence_span].name][k] for k in keys])
        numbers[mask.name] = compare(a, b, study)
    return {
        "transitions": len(by_lag),
        "grid": numbers,
        "lag": lags(by_lag.values(), study.matters),
        "skipped": dict(sorted(scorer.skipped.items())),
        "values": {name: [[*k, v] for k, v in sorted(found.items())] for name, found in values.items()},
    }


def compare(masked: np.ndarray, removed: np.ndarray, study: Faithfulness) -> dict[str, Any]:
    """How well a mask's EALR stands for deletion's, over transitions `[N]` in nats per token."""
    if len(masked) < 2:
        return {"n": len(masked)}
    difference = masked - removed
    constant = np.ptp(masked) == 0 or np.ptp(removed) == 0
    out = {
        "n": len(masked),
        "mean_masked": float(masked.mean()),
        "mean_removed": float(removed.mean()),
        "mean_abs_difference": float(np.abs(difference).mean()),
        "spearman": float("nan") if constant else float(stats.spearmanr(masked, removed).statistic),
        "difference": quantiles(difference.tolist()),
        "sign_flips": float((np.sign(masked) != np.sign(removed)).mean()),
    }
    out["faithful"] = bool(
        out["mean_abs_difference"] <= study.faithful_difference and out["spearman"] >= study.faithful_spearman
    )
    return out


def lags(effects: Sequence[dict[int, float]], matters: float) -> dict[str, Any]:
    """Counts of the lag (in actions) at which evidence first changes an action by `matters` nats per token.

    `later_share` is the share of evidence with at least two later actions that first matters to the second or a later one.
    """
    first: Counter = Counter()
    delayed = possible = 0
    for by_lag in effects:
        lag = next((lag for lag in sorted(by_lag) if abs(by_lag[lag]) >= matters), None)
        first["never" if lag is None else str(lag)] += 1
        if len(by_lag) > 1:
            possible += 1
            delayed += lag is not None and lag > min(by_lag)
    share = delayed / possible if possible else float("nan")
    return {"first": dict(sorted(first.items())), "with_two_later_actions": possible, "later_share": share}


def write_faithfulness(folder: Path, found: dict[str, Any]) -> list[Path]:
    """Writes `faithfulness.json` and `faithfulness.png`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = folder / "faithfulness.json"
    write_atomic(report, json.dumps(found, indent=1) + "\n")
    names = list(found["grid"])
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names):
        removed = {tuple(k): v for *k, v in found["values"][f"removed/{name.split('/')[1]}"]}
        pairs = [(removed[tuple(k)], v) for *k, v in found["values"][name] if tuple(k) in removed]
        x, y = np.asarray(pairs).reshape(-1, 2).T
        axis.plot(x, y, ".", markersize=3, alpha=0.5)
        ends = [min([0.0, *x, *y]), max([0.0, *x, *y])]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        n = found["grid"][name]
        label = f"|d| {n['mean_abs_difference']:.3f}, rho {n['spearman']:.2f}" if "spearman" in n else "too few"
        axis.set_title(f"{name}\n{label}", fontsize=8)
        axis.set_xlabel("EALR, removed", fontsize=8)
        axis.set_ylabel("EALR, masked", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    picture = folder / "faithfulness.png"
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return [report, picture]


def faithfulness_table(found: dict[str, Any]):
    """The grid as a rich table that fits 80 columns: mean |difference|, Spearman's rho, quantiles, sign flips."""
    from rich.table import Table

    table = Table(title=f"masked against removed, {found['transitions']} transitions (nats per token)", padding=(0, 0))
    for column in ("mask_rows", "span", "gdn_mask"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "|diff|", "rho", "5 %", "95 %", "flips", "faithful"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, n in found["grid"].items():
        numbers = ["-"] * 6
        if "spearman" in n:
            d = n["difference"]
            numbers = [
                f"{n['mean_abs_difference']:.3f}", f"{n['spearman']:.3f}", f"{d['q05']:+.3f}", f"{d['q95']:+.3f}",
                f"{n['sign_flips']:.0%}", "yes" if n["faithful"] else "no",
            ]  # fmt: skip
        table.add_row(*name.split("/"), str(n["n"]), *numbers)
    return table
