"""A task from files: question sets, one passage collection, and a model's own tokenizer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import gin

from cipo_jax.data.questions import Question, load_questions
from cipo_jax.data.tokenizer import model_tokenizer
from cipo_jax.errors import UserError
from cipo_jax.protocols.base import Protocol
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.retriever import Retriever
from cipo_jax.training.task import Task


@gin.configurable
def qa_task(
    model: str = gin.REQUIRED,
    retriever: Retriever = gin.REQUIRED,
    train: str | Sequence[str] = gin.REQUIRED,
    validation: str | Sequence[str] = gin.REQUIRED,
    reported: Mapping[str, str] = gin.REQUIRED,
    protocol: Callable[..., Protocol] = SearchR1,
    validation_limit: int | None = None,
) -> Task:
    """Questions from JSON-lines files (see `data/questions.py`), all searching the same passages.

    Args:
      model: folder or `.gguf` file whose tokenizer is used.
      retriever: answers every search, whatever corpus a question names.
      train: file of the RL questions, or several files.
      validation: file of the questions that checkpoints are selected on, or several.
      reported: files of the final table, by name; the first one is the headline.
      protocol: called with the tokenizer.
      validation_limit: takes the first questions of `validation` alone.

    Raises:
      UserError: a file or tokenizer that cannot be read, or no reported set.
    """
    if not reported:
        raise UserError('qa_task.reported is empty; name at least one question set, such as {"nq": "nq_test.jsonl"}')
    sets = {name: load_questions(path) for name, path in reported.items()}
    training, validating = _joined(train), _joined(validation)[:validation_limit]
    for name, path, questions in [("train", train, training), ("validation", validation, validating)] + [
        (f"reported[{name!r}]", reported[name], questions) for name, questions in sets.items()
    ]:
        if not questions:
            raise UserError(f"qa_task.{name}={path!r} holds no question")
    corpora = {q.corpus for part in (training, validating, *sets.values()) for q in part}
    return Task(
        protocol=protocol(model_tokenizer(model)),
        retrievers=dict.fromkeys(corpora, retriever),
        train=training,
        validation=validating,
        reported=sets,
    )


def _joined(paths: str | Sequence[str]) -> list[Question]:
    """The questions of one or several files; several files may use the same ids, so these get their file's name."""
    if isinstance(paths, str):
        return load_questions(paths)
    return [dataclasses.replace(q, id=f"{path}:{q.id}") for path in paths for q in load_questions(path)]
