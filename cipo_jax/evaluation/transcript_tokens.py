"""Transcripts as token ids with roles, turns and spans, ready to score; and this project's own form of a transcript."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cipo_jax.evaluation.transcripts import OWN_PER_TOKEN, OWN_PER_TURN, Transcript
from cipo_jax.rewards.scores import contains_tokens
from cipo_jax.types import Role, StopReason, Trajectories

OVER_LIMIT = "over_token_limit"
NO_NEXT_ACTION = "no_next_action"
NO_ACTION = "no_action"  # nothing that the agent wrote


def encode_transcript(transcript: Transcript, tokenizer: Any, max_tokens: int) -> tuple[dict[str, Any], Counter]:
    """Token ids and spans of one transcript, and how many retrieval turns are left out by reason.

    Pieces are encoded apart and their ids joined, as in a rollout. What does not fit into `max_tokens` is cut at a part's
    border.

    Returns:
      A row for `trajectories_of`, and the counts.
    """
    skipped = Counter(transcript.remarks)
    row = _own(transcript.encoded) if transcript.encoded is not None else _encoded(transcript, tokenizer)
    return _cut(row, max_tokens, skipped)


def _own(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(record[name]) for name in (*OWN_PER_TOKEN, *OWN_PER_TURN)}


def _encoded(transcript: Transcript, tokenizer: Any) -> dict[str, Any]:
    row: dict[str, Any] = {name: [] for name in (*OWN_PER_TOKEN, *OWN_PER_TURN)}
    turn = -1
    for number, part in enumerate(transcript.parts):
        start = len(row["tokens"])
        if part.role == Role.ACTION:
            turn += 1
            for name in OWN_PER_TURN:
                row[name].append([] if name.startswith("passage") else [0, 0])
        spans = []
        for i, piece in enumerate(part.pieces):
            at = len(row["tokens"])
            ids = tokenizer(piece, add_special_tokens=number == 0 and i == 0)["input_ids"] if piece else []
            if number == 0 and ids and ids[-1] == tokenizer.eos_token_id and not piece.endswith(tokenizer.eos_token):
                ids = ids[:-1]
            row["tokens"] += ids
            if i in part.passages:
                spans.append([at, at + len(ids)])
        n = len(row["tokens"]) - start
        row["role"] += [part.role] * n
        row["turn"] += [turn if part.role != Role.PROMPT else -1] * n
        if part.role == Role.ACTION:
            row["action_span"][turn] = [start, start + n] if n else [0, 0]
        spans = [s for s in spans if s[1] > s[0]]
        if part.role == Role.OBSERVATION and spans and turn >= 0:
            row["evidence_span"][turn] = [start, start + n]
            row["content_span"][turn] = [spans[0][0], spans[-1][1]]
            row["passage_span"][turn], row["passage_row"][turn] = spans, list(range(len(spans)))
    return row


def _cut(row: dict[str, Any], max_tokens: int, skipped: Counter) -> tuple[dict[str, Any], Counter]:
    """Drops what lies behind `max_tokens`, and counts the retrieval turns that have no action to score."""
    length = len(row["tokens"])
    if length > max_tokens:
        turns, roles = np.asarray(row["turn"]), np.asarray(row["role"])
        borders = np.flatnonzero(np.diff(turns * 8 + roles)) + 1
        length = max([0, *(int(b) for b in borders if b <= max_tokens)])
    kept = {name: row[name][:length] for name in OWN_PER_TOKEN}
    inside = [bool(a[1] > a[0]) and a[1] <= length for a in row["action_span"]]
    for name in ("action_span", "evidence_span", "content_span"):
        kept[name] = [s if s[1] <= length else [0, 0] for s in row[name]]
    whole = [s[1] > s[0] for s in kept["content_span"]]
    for name in ("passage_span", "passage_row"):
        kept[name] = [p if w else [] for p, w in zip(row[name], whole)]
    for turn, span in enumerate(row["content_span"]):
        if span[1] > span[0]:
            following = row["action_span"][turn + 1] if turn + 1 < len(inside) else [0, 0]
            if following[1] <= following[0]:
                skipped[NO_NEXT_ACTION] += 1
            elif not (whole[turn] and inside[turn + 1]):
                skipped[OVER_LIMIT] += 1
    if not any(inside):
        skipped[NO_ACTION] += 1
    return kept, skipped


def trajectories_of(rows: Sequence[Mapping[str, Any]]) -> Trajectories:
    """Rows padded to the longest, as host arrays; each is a group of its own."""
    B, L = len(rows), max([1, *(len(r["tokens"]) for r in rows)])
    T = max([2, *(len(r["action_span"]) for r in rows)])
    K = max([1, *(len(p) for r in rows for p in r["passage_span"])])
    out = Trajectories(
        tokens=np.zeros((B, L), np.int32),
        role=np.full((B, L), Role.PAD, np.int8),
        turn=np.full((B, L), -1, np.int8),
        behaviour_logprob=np.zeros((B, L), np.float32),
        length=np.asarray([len(r["tokens"]) for r in rows], np.int32),
        group=np.arange(B, dtype=np.int32),
        stop_reason=np.full(B, StopReason.ANSWER, np.int32),
        action_span=np.zeros((B, T, 2), np.int32),
        evidence_span=np.zeros((B, T, 2), np.int32),
        content_span=np.zeros((B, T, 2), np.int32),
        passage_span=np.zeros((B, T, K, 2), np.int32),
        passage_row=np.full((B, T, K), -1, np.int32),
    )
    for b, row in enumerate(rows):
        for name in OWN_PER_TOKEN:
            getattr(out, name)[b, : len(row[name])] = row[name]
        for t in range(len(row["action_span"])):
            for name in ("action_span", "evidence_span", "content_span"):
                getattr(out, name)[b, t] = row[name][t]
            for k, (span, number) in enumerate(zip(row["passage_span"][t], row["passage_row"][t])):
                out.passage_span[b, t, k], out.passage_row[b, t, k] = span, number
    return out


def supportive_passages(trajectories: Trajectories, golds: Sequence[Sequence[str]], tokenizer: Any) -> np.ndarray:
    """`[B, T, K]` bool: the passage's text holds a gold answer, normalised and on token borders."""
    spans = np.asarray(trajectories.passage_span)
    out = np.zeros(spans.shape[:3], bool)
    for b, t, k in np.argwhere(spans[..., 1] > spans[..., 0]):
        text = tokenizer.decode(np.asarray(trajectories.tokens[b, slice(*spans[b, t, k])]).tolist())
        out[b, t, k] = any(contains_tokens(text, gold) for gold in golds[b])
    return out


def write_transcripts(path: str | Path, trajectories: Trajectories, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes this project's own form: a JSON line per trajectory with its ids, roles, turns and spans.

    Args:
      path: the file.
      trajectories: host arrays.
      records: per trajectory what else to keep, such as `{"id", "question", "golds"}`.
    """
    with open(path, "w", encoding="utf-8") as file:
        for b, record in enumerate(records):
            n = int(trajectories.length[b])
            turns = int(np.asarray(trajectories.turn[b]).max()) + 1
            row = {name: np.asarray(getattr(trajectories, name)[b, :n]).tolist() for name in OWN_PER_TOKEN}
            row |= {name: np.asarray(getattr(trajectories, name)[b, :turns]).tolist() for name in OWN_PER_TURN}
            for t in range(turns):
                real = [k for k, number in enumerate(row["passage_row"][t]) if number >= 0]
                row["passage_span"][t] = [row["passage_span"][t][k] for k in real]
                row["passage_row"][t] = [row["passage_row"][t][k] for k in real]
            file.write(json.dumps({**record, **row}, ensure_ascii=False) + "\n")
