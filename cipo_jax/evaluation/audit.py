"""Audit of transcripts: how much each action owes to the evidence before it, and to which passage."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.audit_store import BatchStore
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
      copies: places for copied tokens are taken in multiples of this; each multiple is compiled once.
      used: a passage counts as used above this many nats per token (our choice).
      prior_driven: an answer with less than this many nats per token is a candidate for a prior-driven one (our choice).
      block: side of an attention tile; None for what suits the device.
    """

    counterfactuals: Sequence[Counterfactual] = (Masked(), Removed())
    passages: bool = True
    places: int = 4096
    rows: int = 1
    copies: int = 512
    used: float = 0.05
    prior_driven: float = 0.05
    block: int | None = None

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
    """

    transcript: Transcript
    row: Trajectories
    token_difference: np.ndarray
    turns: list[dict[str, Any]]


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
        self.scorer = EvidenceScorer(scorer, counterfactual, rules, bucket=config.copies)
        self.skipped: Counter = Counter()

    def __call__(
        self, transcripts: Sequence[Transcript]
    ) -> Iterator[tuple[list[Transcript], EvidenceScores, np.ndarray]]:
        """Batches as `(transcripts, scores, supportive [B, T, K])`, in order."""
        for part, rows in self.batches(transcripts):
            yield part, *self.score(part, rows)

    def kept(
        self,
        transcripts: Sequence[Transcript],
        distil: Callable[[list[Transcript], EvidenceScores, np.ndarray], list],
        store: BatchStore | None = None,
    ) -> Iterator[tuple[list[Transcript], list[dict[str, Any]], list]]:
        """Batches as `(transcripts, encoded rows, distil(transcripts, scores, supportive))`.

        What `distil` gives must be fit for JSON; the store keeps it, and batches that it already holds are not scored.
        """
        for number, (part, rows) in enumerate(self.batches(transcripts)):
            found = None if store is None else store.get(number)
            if found is None:
                found = distil(part, *self.score(part, rows))
                if store is not None:
                    store.append(number, found)
            yield part, rows, found

    def score(self, part: Sequence[Transcript], rows: Sequence[Mapping]) -> tuple[EvidenceScores, np.ndarray]:
        """The scores of one batch, and `[B, T, K]` bool, its passages that hold a gold answer."""
        batch, c = trajectories_of(rows), self.config
        supportive = supportive_passages(batch, [t.golds for t in part], self.tokenizer)
        return self.scorer.score_packed(self.model.params, batch, c.places, supportive, c.rows), supportive

    def batches(self, transcripts: Sequence[Transcript]) -> Iterator[tuple[list[Transcript], list[dict[str, Any]]]]:
        """Transcripts with their encoded rows, as many as fill the rows of one pass; the same ones every time."""
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
    store: BatchStore | None = None,
) -> tuple[list[Audited], Counter]:
    """Scores transcripts; returns them with their records, and how many retrieval turns were left out by reason.

    Args:
      transcripts: to score.
      model, rules, tokenizer, config: see `TranscriptScorer`.
      progress: called with the number of transcripts of each batch that is done.
      store: keeps what is scored, batch by batch, and spares the batches that it already holds.
    """
    kinds = list(config.counterfactuals)
    if config.passages:
        most = max([0, *(len(p.passages) for t in transcripts for p in t.parts)])
        most = max([most, *(len(p) for t in transcripts if t.encoded for p in t.encoded["passage_span"])])
        kinds += [OnlyPassages(k) for k in range(most)]
    scorer = TranscriptScorer(model, rules, tokenizer, config, Several(kinds))
    found = []

    def distil(part, scores, supportive):
        return _scored(part, scores, supportive, tokenizer, config)

    for part, rows, scored in scorer.kept(transcripts, distil, store):
        for transcript, row, one in zip(part, rows, scored, strict=True):
            row = trajectories_of([row]).map(lambda x: x[0])
            difference = np.zeros(row.tokens.shape, np.float32)
            for start, values in one["differences"]:
                difference[start : start + len(values)] = values
            found.append(Audited(transcript, row, difference, one["turns"]))
        progress(len(part))
    return found, scorer.skipped


def _scored(part, scores: EvidenceScores, supportive, tokenizer, config: AuditConfig) -> list[dict[str, Any]]:
    """Per transcript its records, and the first counterfactual's differences as `[first place, values]` per action."""
    batch, first = scores.trajectories, config.counterfactuals[0].name
    out: list[dict[str, Any]] = [{"turns": [], "differences": []} for _ in part]
    effects: dict[tuple[int, int], dict[str, Any]] = {}
    for e in scores.effects():
        effects.setdefault((e.row, e.turn), {}).setdefault(e.kind, []).append(e)
        if e.kind == first and e.action == e.turn + 1:
            start = int(batch.action_span[e.row, e.action, 0])
            out[e.row]["differences"].append([start, np.round(e.difference, 4).tolist()])
    for (b, turn), kinds in sorted(effects.items()):
        row = batch.map(lambda x, b=b: np.asarray(x[b]))
        out[b]["turns"].append(_record(part[b], row, turn, kinds, supportive[b], tokenizer, config))
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
