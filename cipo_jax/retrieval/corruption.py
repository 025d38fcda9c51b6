"""Corrupted evidence: passages that bear chosen questions' answers name a wrong entity of the same type instead.

For SOAR's corrupted-training study (arXiv 2610.13157). The list of corrupted passages is made once, saved, and shared
by all methods compared.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import gin

from cipo_jax.errors import UserError
from cipo_jax.retrieval.dense import query_rng
from cipo_jax.retrieval.retriever import Passage, Retriever


@dataclasses.dataclass(frozen=True)
class Corruption:
    """One question's corrupted passages.

    Attributes:
      question_id: of the question.
      golds: its answers, which no longer occur in `passages`.
      wrong: what stands in their place.
      passages: `(row, title, text)` as shown instead of the originals.
    """

    question_id: str
    golds: tuple[str, ...]
    wrong: str
    passages: tuple[tuple[int, str, str], ...]


@gin.configurable
class CorruptedRetriever:
    """Shows the corrupted passages of a saved list wherever the other retriever returns their originals.

    The replacement is by passage, whatever the query (our choice): an agent that rephrases its query cannot get around
    it, and a question not on the list sees it only where it shares a passage.

    Args:
      retriever: searches the true corpus; ranks and scores stay its own.
      path: a list that `save_corruptions` wrote.

    Attributes:
      replaced: passages replaced so far.
    """

    def __init__(self, retriever: Retriever = gin.REQUIRED, path: str = gin.REQUIRED):
        self._retriever = retriever
        self._false = {row: (title, text) for c in load_corruptions(path) for row, title, text in c.passages}
        self.replaced = 0

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        answers = [[self._corrupt(p) for p in found] for found in self._retriever.retrieve(queries, top_k)]
        self.replaced += sum(p.row in self._false for found in answers for p in found)
        return answers

    def passage(self, row: int) -> Passage:
        return self._corrupt(self._retriever.passage(row))

    def _corrupt(self, passage: Passage) -> Passage:
        if passage.row not in self._false:
            return passage
        title, text = self._false[passage.row]
        return dataclasses.replace(passage, title=title, text=text)


def corrupt(
    questions: Iterable[tuple[str, str, Sequence[str], str]], retriever: Retriever, depth: int = 20, seed: int = 0
) -> list[Corruption]:
    """Makes the corrupted passages of chosen questions.

    A passage bears the answer when a gold occurs in it on word borders. The wrong entity is another question's first
    gold of the same type that is not one of this question's golds, drawn from the question's text and the seed.

    Args:
      questions: `(id, question, golds, type)`; golds of equal type can stand for each other.
      retriever: finds each question's passages, by the question and by the question with each gold.
      depth: passages looked at per search.
      seed: of the draw.

    Returns:
      One entry per question with at least one bearing passage and a wrong entity. A passage is corrupted once, for the
      first question that claims it.
    """
    questions = [(i, q, tuple(golds), kind) for i, q, golds, kind in questions]
    by_type: dict[str, list[str]] = {}
    for _, _, golds, kind in questions:
        by_type.setdefault(kind, []).extend(golds[:1])
    taken: set[int] = set()
    made = []
    for identifier, question, golds, kind in questions:
        own = {g.casefold() for g in golds}
        others = [g for g in dict.fromkeys(by_type[kind]) if g.casefold() not in own]
        if not others or not any(golds):
            continue
        wrong = others[query_rng(question, seed).integers(len(others))]
        searches = [question, *(f"{question} {gold}" for gold in golds)]
        found = {p.row: p for answer in retriever.retrieve(searches, depth) for p in answer}
        passages = []
        for row, passage in sorted(found.items()):
            title, text = substitute(passage.title, golds, wrong), substitute(passage.text, golds, wrong)
            if row not in taken and (title, text) != (passage.title, passage.text):
                passages.append((row, title, text))
        if passages:
            taken.update(row for row, _, _ in passages)
            made.append(Corruption(identifier, golds, wrong, tuple(passages)))
    return made


def substitute(text: str, golds: Sequence[str], wrong: str) -> str:
    """Replaces every occurrence of a gold on word borders, letter case ignored, longest gold first."""
    parts = sorted((g for g in golds if g.strip()), key=len, reverse=True)
    if not parts:
        return text
    pattern = "|".join(re.escape(part) for part in parts)
    return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda _: wrong, text, flags=re.IGNORECASE)


def save_corruptions(corruptions: Iterable[Corruption], path: str | Path) -> None:
    """Writes one JSON line per question."""
    lines = [json.dumps(dataclasses.asdict(c), ensure_ascii=False) for c in corruptions]
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def load_corruptions(path: str | Path) -> list[Corruption]:
    """Reads `save_corruptions`' file; `UserError` with file and line for anything else, or a row claimed twice."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"corruption list {str(path)!r} cannot be read ({error})") from None
    made, rows = [], {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, Mapping):
                raise ValueError("not a JSON object")
            passages = tuple((int(row), str(title), str(text)) for row, title, text in record["passages"])
            made.append(Corruption(record["question_id"], tuple(record["golds"]), record["wrong"], passages))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a corruption ({error!r}); make the list with corrupt()") from None
        for row, _, _ in passages:
            if row in rows:
                raise UserError(f"{path}:{number}: row {row} is already corrupted in line {rows[row]}; remove one")
            rows[row] = number
    return made
