"""One question with its gold answers, the passage collection it may search, and its JSON-lines form."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cipo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Question:
    """A question-answering example.

    Attributes:
      id: unique within a question set.
      question: the text shown to the agent.
      golds: the accepted answers (aliases), at least one.
      corpus: names the passage collection that its searches see.
      meta: JSON-like facts about the question for evaluation; never shown to the agent.
    """

    id: str
    question: str
    golds: tuple[str, ...]
    corpus: str = "default"
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Writes JSON lines `{"id", "question", "golden_answers", "corpus", "metadata"}` (FlashRAG's names)."""
    with open(path, "w", encoding="utf-8") as file:
        for q in questions:
            row = {"id": q.id, "question": q.question, "golden_answers": list(q.golds)}
            row |= {"corpus": q.corpus, "metadata": dict(q.meta)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def load_questions(path: str | Path) -> list[Question]:
    """Reads what `save_questions` writes, and FlashRAG's question sets.

    Raises:
      UserError: naming file and line, for a line that is no JSON object, a missing or empty question, missing, empty
        or non-list golds, or an id seen before.
    """
    questions: list[Question] = []
    seen: dict[str, int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); give a JSON-lines file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error}); write one JSON object per line.") from error
        question = question_from_row(row, where, default_id=str(len(questions)))
        if question.id in seen:
            raise UserError(f"{where}: id {question.id!r} was used on line {seen[question.id]}; make ids unique.")
        seen[question.id] = number
        questions.append(question)
    return questions


def question_from_row(row: Any, where: str, default_id: str) -> Question:
    """Builds a question from one JSON object; `where` (`file:line`) opens every error."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: {str(row)[:60]!r} is no JSON object; write an object with question and golds.")
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: question={text!r} is not a non-empty text; give the question.")
    golds = row.get("golden_answers")
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) for gold in golds):
        raise UserError(f'{where}: golden_answers={golds!r} is not a non-empty list of texts; write ["answer", ..].')
    meta = row.get("metadata") or {}
    if not isinstance(meta, Mapping):
        raise UserError(f"{where}: metadata={meta!r} is no JSON object; remove it or write an object.")
    return Question(
        id=str(row.get("id", default_id)),
        question=text,
        golds=tuple(golds),
        corpus=str(row.get("corpus", "default")),
        meta=dict(meta),
    )
