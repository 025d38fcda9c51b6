"""The order of questions: one integer is the whole position."""

import collections

import pytest

from cipo_jax.data.iteration import fingerprint, question_batches
from cipo_jax.data.questions import Question
from cipo_jax.errors import UserError

QUESTIONS = [Question(str(i), f"q{i}?", (f"a{i}",)) for i in range(23)]


def _stream(batch: int, steps: int, seed: int = 0) -> list[str]:
    batches = question_batches(QUESTIONS, batch, seed)
    return [q.id for step in range(steps) for q in batches[step]]


def test_each_epoch_holds_every_question_once():
    stream = _stream(batch=4, steps=23)  # 92 questions: exactly four epochs, three borders inside a batch
    everything = {q.id for q in QUESTIONS}
    epochs = [stream[i * 23 : (i + 1) * 23] for i in range(4)]
    for epoch in epochs:
        assert collections.Counter(epoch) == collections.Counter(everything)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # every epoch has an order of its own


def test_order_does_not_depend_on_the_batch_size():
    assert _stream(batch=4, steps=15) == _stream(batch=6, steps=10) == _stream(batch=60, steps=1)


def test_any_step_can_be_resumed_without_the_ones_before():
    straight = question_batches(QUESTIONS, 5, 7)
    wanted = [straight[step] for step in range(20)]
    for step in (19, 3, 11):
        assert question_batches(QUESTIONS, 5, 7)[step] == wanted[step]


def test_seeds_differ_and_repeat():
    assert _stream(4, 6, seed=1) == _stream(4, 6, seed=1)
    assert _stream(4, 6, seed=1) != _stream(4, 6, seed=2)
    assert _stream(4, 6, seed=-1) == _stream(4, 6, seed=2**32 - 1)


def test_epoch_counts():
    batches = question_batches(QUESTIONS, 46, 0)
    assert batches.epoch(3) == 6.0 and batches.steps_per_epoch == 0.5


def test_fingerprint_tells_data_sets_apart():
    changed = [*QUESTIONS[:-1], Question("22", "q22?", ("other",))]
    prints = {fingerprint(QUESTIONS), fingerprint(QUESTIONS[::-1]), fingerprint(changed)}
    assert len(prints) == 3
    assert question_batches(QUESTIONS, 4, 0).fingerprint == fingerprint(list(QUESTIONS))


def test_bad_sizes_are_refused():
    with pytest.raises(UserError, match="batches of 0"):
        question_batches(QUESTIONS, 0, 0)
    with pytest.raises(UserError, match="0 questions"):
        question_batches([], 4, 0)
    with pytest.raises(IndexError):
        question_batches(QUESTIONS, 4, 0)[-1]
