"""Deterministic, resumable order of the training questions: the position is one integer, the step."""

import hashlib
import json
from collections.abc import Sequence

import grain

from cipo_jax.data.questions import Question
from cipo_jax.errors import UserError


class QuestionBatches:
    """Batches by step: `batches[step]` is a pure function of the questions, the seed and the step.

    The stream of questions is every epoch's own shuffle, epochs one after another; batch `step` is the stream's
    elements `[step * batch, (step + 1) * batch)`. So the stream depends on the seed alone (not on the batch size, the
    number of hosts or where a run was resumed), each epoch holds every question exactly once, and a batch that crosses
    the border of two epochs holds the end of one and the start of the next. Such a batch may hold a question twice if
    the number of questions is no multiple of the batch.

    Attributes:
      batch: questions in a batch.
      fingerprint: a hash of all questions in order; a checkpoint keeps it to refuse another data set on resume.
    """

    def __init__(self, questions: Sequence[Question], batch: int, seed: int):
        if batch < 1 or not questions:
            raise UserError(f"{len(questions)} questions in batches of {batch}; give at least one of both.")
        self.batch = batch
        self.fingerprint = fingerprint(questions)
        self._size = len(questions)
        self._stream = grain.MapDataset.source(questions).shuffle(seed=seed % 2**32).repeat()

    def __getitem__(self, step: int) -> list[Question]:
        if step < 0:
            raise IndexError(f"step {step} is negative")
        return [self._stream[step * self.batch + i] for i in range(self.batch)]

    def epoch(self, step: int) -> float:
        """Epochs completed before batch `step`."""
        return step * self.batch / self._size

    @property
    def steps_per_epoch(self) -> float:
        """Batches in an epoch."""
        return self._size / self.batch


def question_batches(questions: Sequence[Question], batch: int, seed: int) -> QuestionBatches:
    """Batches of `batch` questions in an order fixed by `seed`; see `QuestionBatches`."""
    return QuestionBatches(questions, batch, seed)


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 (hex) over ids, texts, golds and corpora, in order."""
    digest = hashlib.sha256()
    for q in questions:
        digest.update(json.dumps([q.id, q.question, list(q.golds), q.corpus]).encode())
        digest.update(b"\n")
    return digest.hexdigest()
