"""Trajectories written for people: one self-contained HTML file per evaluation, with roles and EALR in colour."""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cipo_jax.evaluation.behaviour import Behaviour
from cipo_jax.rollout.episode import Episode
from cipo_jax.training.run_dir import write_atomic
from cipo_jax.types import Role, Trajectories

FULL_COLOUR = 4.0  # nats: a token whose log-prob the evidence changes by this much has the full colour

STYLE = """
.sample{font:14px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;border:1px solid #d4d9df;border-radius:8px;
 margin:0 0 24px;padding:16px 18px;max-width:920px}
.sample h2{font-size:16px;margin:0 0 8px}
.sample .facts{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 12px;color:#57606a}
.sample .facts b{color:#1b1f24;font-weight:600}
.sample .badge{border-radius:10px;padding:0 9px;font-weight:600;color:#fff;background:#6e7781}
.sample .evidence_driven{background:#1a7f5a}
.sample .prior_driven{background:#b35900}.sample .malformed{background:#a40e26}
.sample .block{border-left:4px solid #c9d1d9;padding:3px 0 3px 12px;margin:7px 0}
.sample .label{font-size:12px;color:#57606a}
.sample .text{font:13px/1.6 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.sample .action{border-color:#3b6fd4}.sample .observation{border-color:#8f9aa6;background:#f6f8fa}
.sample .observation .text,.sample .prompt .text{color:#57606a}
.sample summary{cursor:pointer;font-size:12px;color:#57606a}
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{background:#eef1f4;margin:24px auto;max-width:960px;padding:0 12px;font:14px/1.5 system-ui,sans-serif}}
h1{{font-size:20px}}.note{{color:#57606a}}.key span{{padding:0 6px;border-radius:3px}}{style}</style></head><body>
<h1>{title}</h1>
{legend}
{articles}
</body></html>
"""
LEGEND = (
    '<p class="note">Blue bar: what the agent wrote. Grey: prompt and retrieved passages.</p>',
    '<p class="note key">Words are shaded by what the last retrieved passages change in their log-probability: '
    '<span style="background:rgba(9,105,218,.55)">evidence made it likelier</span> '
    '<span style="background:rgba(219,109,40,.55)">less likely</span>; full colour at {full:g} nats. EALR is the mean '
    "over an action's tokens.</p>",
)


def samples_path(run_dir: str | Path, step: int) -> Path:
    """Where a run keeps the samples of the evaluation after `step` updates; names sort by step."""
    return Path(run_dir) / "samples" / f"step_{step:06d}.html"


def write_samples(
    path: str | Path,
    title: str,
    trajectories: Trajectories,
    episodes: Sequence[Episode],
    tokenizer: Any,
    *,
    behaviours: Sequence[Behaviour] | None = None,
    token_ealr: np.ndarray | None = None,
    limit: int = 8,
) -> Path:
    """Writes the first trajectories of a batch as one HTML file that needs nothing else.

    Args:
      path: the file; parents are created and an old one is replaced in one step.
      title: heading, such as `step 40, validation`.
      trajectories: `[B, L]`, host arrays.
      episodes: the same trajectories as text, in order; more may follow.
      tokenizer: decodes the ids.
      behaviours: what `judge` said of each.
      token_ealr: `[B, L]` float, visible minus masked log-prob (nats) of each action token; None for no shading.
      limit: trajectories to write.

    Returns:
      The path.
    """
    articles = []
    for b, episode in enumerate(episodes[: min(limit, len(trajectories.length))]):
        ealr = None if token_ealr is None else np.asarray(token_ealr[b], np.float64)
        judged = behaviours[b] if behaviours is not None else None
        articles.append(_article(trajectories.map(lambda x, b=b: np.asarray(x[b])), episode, tokenizer, judged, ealr))
    legend = "\n".join(LEGEND[: 1 if token_ealr is None else 2]).format(full=FULL_COLOUR)
    page = PAGE.format(title=html.escape(title), style=STYLE, legend=legend, articles="\n".join(articles))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page)
    return path


def read_samples(path: str | Path) -> dict[str, tuple[str, str]]:
    """The trajectories of a file by question id, as (behaviour or empty, HTML with its style): for notebooks."""
    page = Path(path).read_text(encoding="utf-8")
    found = re.finditer(
        r'<article class="sample" data-question="(.*?)" data-behaviour="(.*?)">.*?</article>', page, re.S
    )
    return {html.unescape(m[1]): (m[2], f"<style>{STYLE}</style>{m[0]}") for m in found}


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """One text per token; together they are the decoded text. A token that ends inside a character has the text ""."""
    texts, before = [], ""
    for i in range(len(ids)):
        now = tokenizer.decode(list(ids[: i + 1]), clean_up_tokenization_spaces=False)
        if now.endswith("\ufffd") and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        before = now
    return texts


def _article(
    row: Trajectories, episode: Episode, tokenizer: Any, judged: Behaviour | None, ealr: np.ndarray | None
) -> str:
    """One trajectory; `row` holds arrays without the batch axis."""
    question = episode.question
    behaviour = (judged.behaviour if judged else None) or ""
    facts = {"gold": " / ".join(question.golds), "answer": episode.answer or "none"}
    if "prior_answer" in question.meta:
        facts["memory says"] = question.meta["prior_answer"]
    if judged:
        facts |= {"EM": f"{judged.em:.0f}", "F1": f"{judged.f1:.2f}"}
    facts |= {"searches": str(episode.searches), "ended by": episode.stop_reason.replace("_", " ")}
    facts["tokens"] = str(episode.length)
    shown = "".join(f"<span>{key} <b>{html.escape(str(value))}</b></span>" for key, value in facts.items())
    badge = f'<span class="badge {behaviour}">{behaviour.replace("_", "-")}</span>' if behaviour else ""
    blocks = "\n".join(_block(row, turn, role, tokenizer, ealr) for turn, role in _blocks(row))
    identity = f'data-question="{html.escape(question.id)}" data-behaviour="{behaviour}"'
    return (
        f'<article class="sample" {identity}>\n<h2>{html.escape(question.question)}</h2>\n'
        f'<div class="facts">{badge}{shown}</div>\n{blocks}\n</article>'
    )


def _blocks(row: Trajectories) -> list[tuple[int, int]]:
    """(turn, role) in the order of the tokens; a turn's action and observation are contiguous."""
    pairs = zip(row.turn.tolist(), row.role.tolist())
    return list(dict.fromkeys(pair for pair in pairs if pair[1] != Role.PAD))


def _block(row: Trajectories, turn: int, role: int, tokenizer: Any, ealr: np.ndarray | None) -> str:
    places = np.flatnonzero((row.turn == turn) & (row.role == role))
    ids = row.tokens[places].tolist()
    text = html.escape(tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip("\n"))
    if role == Role.PROMPT:
        return f'<details class="block prompt"><summary>prompt</summary><div class="text">{text}</div></details>'
    if role == Role.OBSERVATION:
        passages = int((row.passage_row[turn] >= 0).sum())
        label = f"{passages} passage{'s' * (passages != 1)} retrieved" if passages else "remark of the environment"
        return f'<div class="block observation"><div class="label">{label}</div><div class="text">{text}</div></div>'
    label = f"action {turn + 1}"
    if ealr is not None and turn > 0 and row.content_span[turn - 1, 1] > row.content_span[turn - 1, 0]:
        label += f" &middot; EALR {ealr[places].mean():+.2f} nats per token"
        text = "".join(_shaded(t, x) for t, x in zip(token_texts(ids, tokenizer), ealr[places].tolist()))
    return f'<div class="block action"><div class="label">{label}</div><div class="text">{text}</div></div>'


def _shaded(text: str, nats: float) -> str:
    strength = min(abs(nats) / FULL_COLOUR, 1.0) * 0.7
    escaped = html.escape(text)
    if not strength >= 0.02:  # also NaN
        return escaped
    colour = "9,105,218" if nats > 0 else "219,109,40"
    return f'<span style="background:rgba({colour},{strength:.2f})" title="{nats:+.2f} nats">{escaped}</span>'
