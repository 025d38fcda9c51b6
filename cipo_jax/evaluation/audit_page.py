"""The audit as one self-contained HTML page: distributions, then trajectories with tokens coloured by EALR."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cipo_jax.evaluation.audit import Audited
from cipo_jax.training.run_dir import write_atomic
from cipo_jax.training.samples import FULL_COLOUR, LEGEND, PAGE, STYLE, token_texts
from cipo_jax.types import Role

MORE_STYLE = """
.sample table{border-collapse:collapse;margin:8px 0;font-size:13px}
.sample td,.sample th{padding:1px 10px 1px 0;text-align:left}
.bar{display:inline-block;height:9px;border-radius:2px;vertical-align:middle}
.panel{background:#fff;border:1px solid #d4d9df;border-radius:8px;padding:12px 18px;margin:0 0 24px;max-width:920px}
.panel table{border-collapse:collapse;margin:0 0 12px}.panel td,.panel th{padding:2px 14px 2px 0;text-align:right}
.panel td:first-child,.panel th:first-child,.panel .facts td{text-align:left}
.panel svg{margin:6px 18px 6px 0}
"""


def write_page(
    path: Path, title: str, found: Sequence[Audited], summary: Mapping[str, Any], tokenizer: Any, first: str, limit: int
) -> Path:
    """Writes the page: prior-driven candidates first, then by the EALR of the last action, smallest first.

    Args:
      path: the file.
      title: its heading.
      found: the transcripts.
      summary: of `summarise_audit`.
      tokenizer: decodes ids.
      first: the counterfactual that orders and colours.
      limit: transcripts shown; the numbers above them are of all.
    """
    shown = sorted((a for a in found if a.turns), key=lambda a: _order(a, first))
    articles = [_article(a, tokenizer, first) for a in shown[:limit]]
    note = (
        f'<p class="note">{len(articles)} of {len(found)} transcripts, those that owe least to their evidence first. '
    )
    note += "Bars beside passages: what hiding that passage alone changes, in nats per token.</p>"
    legend = "\n".join(LEGEND).format(full=FULL_COLOUR) + _summary(found, summary, first) + note
    write_atomic(
        path,
        PAGE.format(title=html.escape(title), style=STYLE + MORE_STYLE, legend=legend, articles="\n".join(articles)),
    )
    return path


def _order(audited: Audited, first: str) -> tuple[bool, float]:
    last = audited.turns[-1]
    value = last["ealr"].get(first)
    return not last.get("prior_driven_candidate", False), value if isinstance(value, float) else 0.0


def _summary(found: Sequence[Audited], summary: Mapping[str, Any], first: str) -> str:
    rows = [("transcripts", summary["transcripts"]), ("retrieval turns scored", summary["turns_scored"])]
    rows += [(f"skipped: {reason.replace('_', ' ')}", n) for reason, n in summary["turns_skipped"].items()]
    if summary["records_unreadable"]:
        rows.append(("records not readable", summary["records_unreadable"]))
    if "prior_driven_candidates" in summary:
        counts = summary["prior_driven_candidates"]
        rows.append(("prior-driven candidates", f"{counts['n']} of {counts['of_answers']} answers"))
    for which, name in (("holds_answer", "that hold the answer"), ("holds_none", "that do not")):
        if f"passages_{which}" in summary:
            p = summary[f"passages_{which}"]
            rows.append((f"passages {name}", f"{p['n']}, EALR {p['ealr']}, used {p['used']}"))
    facts = "".join(f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>" for k, v in rows)
    head = "<tr><th>EALR, nats per token</th><th>n</th><th>mean</th><th>5 %</th><th>median</th><th>95 %</th></tr>"
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{q['n']}</td>"
        + "".join(f"<td>{q[k]:+.3f}</td>" for k in ("mean", "q05", "median", "q95"))
        + "</tr>"
        for name, q in summary["ealr"].items()
    )
    charts = ""
    for kind in ("search", "answer", "other"):
        values = [
            r["ealr"][first]
            for a in found
            for r in a.turns
            if r["action"] == kind and isinstance(r["ealr"].get(first), float)
        ]
        if values:
            charts += histogram(values, f"{first}: {kind} actions")
    return f'<div class="panel"><table class="facts">{facts}</table><table>{head}{body}</table>{charts}</div>'


def histogram(values: Sequence[float], title: str, bins: int = 30) -> str:
    """An inline SVG histogram; the outermost bins hold what lies beyond the 1st and 99th percentile."""
    x = np.asarray(values, np.float64)
    low, high = (float(v) for v in np.quantile(x, (0.01, 0.99)))
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(np.clip(x, low, high), bins, (low, high))
    width, height = 280, 90
    bars = "".join(
        f'<rect x="{i * width / bins:.1f}" y="{height - h:.1f}" width="{width / bins - 1:.1f}" height="{h:.1f}" '
        f'fill="#3b6fd4"><title>{n}</title></rect>'
        for i, n in enumerate(counts.tolist())
        for h in [height * n / max(1, counts.max())]
    )
    zero = width * (0 - low) / (high - low)
    return (
        f'<svg width="{width}" height="{height + 34}" role="img">'
        f'<text x="0" y="11" font-size="12">{html.escape(title)}</text>'
        f'<g transform="translate(0,16)">{bars}<line x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}" stroke="#a40e26"/>'
        f'<text x="0" y="{height + 14}" font-size="11">{low:+.2f}</text>'
        f'<text x="{width}" y="{height + 14}" font-size="11" text-anchor="end">{high:+.2f}</text></g></svg>'
    )


def _article(audited: Audited, tokenizer: Any, first: str) -> str:
    transcript, row = audited.transcript, audited.row
    facts = {"id": transcript.id, "gold": " / ".join(transcript.golds) or "-", "tokens": int(row.length)}
    shown = "".join(f"<span>{k} <b>{html.escape(str(v))}</b></span>" for k, v in facts.items())
    candidate = any(r.get("prior_driven_candidate") for r in audited.turns)
    badge = '<span class="badge prior_driven">prior-driven candidate</span>' if candidate else ""
    records = {r["turn"]: r for r in audited.turns}
    pairs = list(dict.fromkeys(zip(row.turn.tolist(), row.role.tolist())))
    blocks = "\n".join(
        _block(audited, turn, role, records, tokenizer, first) for turn, role in pairs if role != Role.PAD
    )
    return (
        f'<article class="sample" data-question="{html.escape(transcript.id)}" data-behaviour="">'
        f"\n<h2>{html.escape(transcript.question or transcript.id)}</h2>\n"
        f'<div class="facts">{badge}{shown}</div>\n{blocks}\n</article>'
    )


def _block(audited: Audited, turn: int, role: int, records: Mapping[int, dict], tokenizer: Any, first: str) -> str:
    row = audited.row
    places = np.flatnonzero((row.turn == turn) & (row.role == role))
    ids = row.tokens[places].tolist()
    text = html.escape(tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip("\n"))
    if role == Role.PROMPT:
        return f'<details class="block prompt"><summary>prompt</summary><div class="text">{text}</div></details>'
    if role == Role.OBSERVATION:
        table = _passages(records[turn], first) if turn in records else ""
        body = f'<summary>observation</summary><div class="text">{text}</div>'
        return f'<details class="block observation">{body}</details>{table}'
    label = f"action {turn + 1}"
    if turn - 1 in records:
        record = records[turn - 1]
        label += f" ({record['action']})"
        for name, value in record["ealr"].items():
            if isinstance(value, float):
                label += f" &middot; {html.escape(name)} {value:+.3f}"
        label += " nats per token"
        difference = audited.token_difference[places].tolist()
        text = "".join(_shaded(t, x) for t, x in zip(token_texts(ids, tokenizer), difference))
    return f'<div class="block action"><div class="label">{label}</div><div class="text">{text}</div></div>'


def _passages(record: Mapping[str, Any], first: str) -> str:
    """Utilisation of each passage: what hiding it alone changes."""
    if not record["passages"]:
        return ""
    rows = ""
    for k, passage in enumerate(record["passages"], 1):
        width = min(200, abs(passage["ealr"]) * 400)
        colour = "#0969da" if passage["ealr"] > 0 else "#db6d28"
        holds = {True: "holds the answer", False: "without the answer", None: ""}[passage.get("holds_answer")]
        rows += (
            f"<tr><td>passage {k}</td><td>{passage['ealr']:+.3f}</td><td>{'used' if passage['used'] else 'not used'}</td>"
            f'<td>{holds}</td><td><span class="bar" style="width:{width:.0f}px;background:{colour}"></span></td></tr>'
        )
    return f"<table>{rows}</table>"


def _shaded(text: str, nats: float) -> str:
    strength = min(abs(nats) / FULL_COLOUR, 1.0) * 0.7
    if not strength >= 0.02:  # also NaN
        return html.escape(text)
    colour = "9,105,218" if nats > 0 else "219,109,40"
    return f'<span style="background:rgba({colour},{strength:.2f})" title="{nats:+.2f} nats">{html.escape(text)}</span>'
