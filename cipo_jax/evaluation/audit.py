"""Audit of transcripts: how much each action owes to the evidence before it, and to which passage."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.statistics import bootstrap_mean
from cipo_jax.evaluation.transcript_tokens import encode_transcript, supportive_passages, trajectories_of
from cipo_jax.evaluation.transcripts import Transcript
from cipo_jax.models.weights import Loaded
from cipo_jax.scoring.counterfactuals import Counterfactual, Masked, Removed, Several
from cipo_jax.scoring.evidence import EvidenceScorer, EvidenceScores
from cipo_jax.scoring.passages import OnlyPassages
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Trajectories


@gin.configurable
@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """What an audit computes.

    Attributes:
      counterfactuals: what is hidden; EALR is reported for each, and the first one orders and colours the page.
      passages: also hide each passage alone.
      places: tokens of a row; several transcripts share one. Longer transcripts are cut.
      rows: rows scored at a time.
      used: a passage counts as used above this many nats per token (our choice).
      prior_driven: an answer with less than this many nats per token is a candidate for a prior-driven one (our choice).
      block: side of an attention tile.
    """

    counterfactuals: Sequence[Counterfactual] = (Masked(), Removed())
    passages: bool = True
    places: int = 2048
    rows: int = 2
    used: float = 0.05
    prior_driven: float = 0.05
    block: int = 256

    def __post_init__(self):
        object.__setattr__(self, "counterfactuals", tuple(self.counterfactuals))
        if not self.counterfactuals:
            raise UserError("AuditConfig.counterfactuals is empty; name at least one, such as @Masked().")


@dataclasses.dataclass
class Audited:
    """One transcript with its scores.

    Attributes:
      transcript: what was read.
      row: its token ids and spans, arrays without the batch axis.
      token_difference: `[L]` float, visible minus counterfactual log-prob (nats) of the first counterfactual.
      turns: a JSON record per retrieval turn that was scored.
      supportive: `[T, K]` bool, passages that hold a gold answer.
    """

    transcript: Transcript
    row: Trajectories
    token_difference: np.ndarray
    turns: list[dict[str, Any]]
    supportive: np.ndarray


class TranscriptScorer:
    """Scores transcripts in batches of one shape, whatever their lengths.

    Args:
      model: the decoder and its parameters.
      rules: sharding table.
      tokenizer: the model's.
      config: see `AuditConfig`.
      counterfactual: what is hidden.
    """

    def __init__(
        self, model: Loaded, rules: ShardingRules, tokenizer: Any, config: AuditConfig, counterfactual: Counterfactual
    ):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        scorer = Scorer(model.graph, config.block)
        self.scorer = EvidenceScorer(scorer, counterfactual, rules, bucket=config.places // 4)
        self.skipped: Counter = Counter()

    def __call__(
        self, transcripts: Sequence[Transcript]
    ) -> Iterator[tuple[list[Transcript], EvidenceScores, np.ndarray]]:
        """Batches as `(transcripts, scores, supportive [B, T, K])`, in order."""
        for part, rows in self._batches(transcripts):
            batch = trajectories_of(rows)
            supportive = supportive_passages(batch, [t.golds for t in part], self.tokenizer)
            c = self.config
            yield part, self.scorer.score_packed(self.model.params, batch, c.places, supportive, c.rows), supportive

    def _batches(self, transcripts: Sequence[Transcript]):
        part, rows, filled = [], [], [0] * self.config.rows
        for transcript in transcripts:
            row, skipped = encode_transcript(transcript, self.tokenizer, self.config.places)
            self.skipped += skipped
            n = len(row["tokens"])
            if not n:
                continue
            fits = next((i for i, used in enumerate(filled) if used + n <= self.config.places), None)
            if fits is None:
                yield part, rows
                part, rows, filled, fits = [], [], [0] * self.config.rows, 0
            filled[fits] += n
            part.append(transcript)
            rows.append(row)
        if part:
            yield part, rows


def audit(
    transcripts: Sequence[Transcript],
    model: Loaded,
    rules: ShardingRules,
    tokenizer: Any,
    config: AuditConfig,
    progress: Callable[[int], None] = lambda n: None,
) -> tuple[list[Audited], Counter]:
    """Scores transcripts; returns them with their records, and how many retrieval turns were left out by reason."""
    kinds = list(config.counterfactuals)
    if config.passages:
        most = max([0, *(len(p.passages) for t in transcripts for p in t.parts)])
        most = max([most, *(len(p) for t in transcripts if t.encoded for p in t.encoded["passage_span"])])
        kinds += [OnlyPassages(k) for k in range(most)]
    scorer = TranscriptScorer(model, rules, tokenizer, config, Several(kinds))
    found = []
    for part, scores, supportive in scorer(transcripts):
        found += _audited(part, scores, supportive, tokenizer, config)
        progress(len(part))
    return found, scorer.skipped


def _audited(part, scores: EvidenceScores, supportive, tokenizer, config: AuditConfig) -> list[Audited]:
    batch, first = scores.trajectories, config.counterfactuals[0].name
    difference = np.zeros(batch.tokens.shape, np.float32)
    effects: dict[tuple[int, int], dict[str, Any]] = {}
    for e in scores.effects():
        effects.setdefault((e.row, e.turn), {}).setdefault(e.kind, []).append(e)
        if e.kind == first and e.action == e.turn + 1:
            start = int(batch.action_span[e.row, e.action, 0])
            difference[e.row, start : start + len(e.difference)] = e.difference
    out = []
    for b, transcript in enumerate(part):
        row = batch.map(lambda x, b=b: np.asarray(x[b]))
        turns = [
            _record(transcript, row, turn, kinds, supportive[b], tokenizer, config)
            for (owner, turn), kinds in sorted(effects.items())
            if owner == b
        ]
        out.append(Audited(transcript, row, difference[b], turns, supportive[b]))
    return out


def _record(transcript, row: Trajectories, turn: int, kinds, supportive, tokenizer, config) -> dict[str, Any]:
    start, end = (int(x) for x in row.action_span[turn + 1])
    text = tokenizer.decode(row.tokens[start:end].tolist())
    ealr = {}
    for kind in config.counterfactuals:
        by_lag = {e.action - turn: e.ealr for e in kinds.get(kind.name, [])}
        if by_lag:
            ealr[kind.name] = by_lag[1] if set(by_lag) == {1} else by_lag
    passages = []
    for k in np.flatnonzero(row.passage_row[turn] >= 0).tolist() if config.passages else []:
        value = kinds[f"without_{k}"][0].ealr
        passages.append({"ealr": value, "used": value > config.used})
        if transcript.golds:
            passages[-1]["holds_answer"] = bool(supportive[turn, k])
    record = {
        "id": transcript.id,
        "turn": turn,
        "action": action_kind(text),
        "action_tokens": end - start,
        "evidence_tokens": int(row.content_span[turn, 1] - row.content_span[turn, 0]),
        "ealr": ealr,
        "passages": passages,
    }
    value = ealr.get(config.counterfactuals[0].name)
    if record["action"] == "answer" and isinstance(value, float):
        record["prior_driven_candidate"] = value < config.prior_driven
    return record


def action_kind(text: str) -> str:
    """`answer`, `search` or `other`, by the first closed call in the text of an action, in any supported form."""
    call = re.search(r"<(answer|search|tool_call)>.*?</\1>", text, re.DOTALL)
    if call:
        return "answer" if call[1] == "answer" else "search"
    # A chat turn without a call is the answer.
    return "answer" if "<|im_end|>" in text and "<" not in text.replace("<|im_end|>", "") else "other"


def summarise_audit(found: Sequence[Audited], skipped: Counter, unreadable: Sequence[str]) -> dict[str, Any]:
    """Numbers over all records: counts, EALR by counterfactual and kind of action, passages with and without an answer."""
    records = [r for a in found for r in a.turns]
    out: dict[str, Any] = {
        "transcripts": len(found),
        "turns_scored": len(records),
        "turns_skipped": dict(sorted(skipped.items())),
        "records_unreadable": len(unreadable),
        "ealr": {},
    }
    for name in sorted({name for r in records for name in r["ealr"]}):
        values = [r["ealr"][name] for r in records if isinstance(r["ealr"].get(name), float)]
        for kind in ("search", "answer", "other"):
            some = [r["ealr"][name] for r in records if r["action"] == kind and isinstance(r["ealr"].get(name), float)]
            if some:
                out["ealr"][f"{name}/{kind}"] = quantiles(some)
        if values:
            out["ealr"][name] = quantiles(values)
    groups: dict[str, list[dict]] = {"holds_answer": [], "holds_none": []}
    labels: dict[str, list[str]] = {"holds_answer": [], "holds_none": []}
    for r in records:
        for passage in r["passages"]:
            if "holds_answer" in passage:
                which = "holds_answer" if passage["holds_answer"] else "holds_none"
                groups[which].append(passage)
                labels[which].append(r["id"])
    for which, passages in groups.items():
        if passages:
            mean = bootstrap_mean([p["ealr"] for p in passages], labels[which])
            used = bootstrap_mean([float(p["used"]) for p in passages], labels[which])
            out[f"passages_{which}"] = {"n": len(passages), "ealr": mean.text(3), "used": used.text(3)}
    candidates = [r["prior_driven_candidate"] for r in records if "prior_driven_candidate" in r]
    if candidates:
        out["prior_driven_candidates"] = {"n": int(sum(candidates)), "of_answers": len(candidates)}
    return out


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Count, mean and five quantiles."""
    x = np.asarray(values, np.float64)
    names = ("q05", "q25", "median", "q75", "q95")
    points = dict(zip(names, np.quantile(x, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()))
    return {"n": len(x), "mean": float(x.mean()), **points}


def write_turns(path: Path, found: Sequence[Audited]) -> None:
    """One JSON line per retrieval turn that was scored."""
    with open(path, "w", encoding="utf-8") as file:
        for audited in found:
            for record in audited.turns:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
