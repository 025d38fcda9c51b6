"""The host's side alone: what a call out of the rollout gives back, and that it gives something back whatever happens."""

import threading

import numpy as np
import pytest
from tiny_world import WORDS, Echo, questions, tiny_tokenizer

from cipo_jax.protocols.base import INVALID_ACTION, RETRIEVAL_FAILED
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.rollout.environment import AWAIT_ALL, AWAIT_ANY, LEAVE, TAKE, Environment

SEARCH, BROKEN = [WORDS.index("<search>a</search>")], [WORDS.index("a"), WORDS.index("<eos>")]
Q, BUDGET = 4, 40


class Gate(Echo):
    """Answers when it is opened."""

    def __init__(self):
        self.open = threading.Event()

    def retrieve(self, queries, top_k):
        assert self.open.wait(10)
        return super().retrieve(queries, top_k)


def environment(retriever=None, **more) -> Environment:
    made = Environment(
        SearchR1(tiny_tokenizer(), instruction="{question}\n"), {"default": retriever or Echo()}, 2, BUDGET, **more
    )
    made.begin(questions(8))
    return made


def call(env, actions, want, ticket=None, budget=BUDGET):
    """`exchange` for slots whose actions just ended (None: nothing new); the tickets and the observations' ids."""
    s = len(actions)
    tail, count = np.zeros((s, Q), np.int32), np.zeros(s, np.int32)
    for i, ids in enumerate(actions):
        count[i] = len(ids or ())
        tail[i, : count[i]] = ids or ()
    new = np.asarray([ids is not None for ids in actions])
    ticket = np.zeros(s, np.int32) if ticket is None else ticket
    full = np.ones(s, np.int32)
    out = env.exchange(new, np.arange(s, dtype=np.int32), tail, count, budget * full, ticket, want * full)
    n, _, _, _, ids = env.layout.read(out[:, 1:])
    return out[:, 0], [row[:k].tolist() for row, k in zip(ids, n)]


def test_searches_wait_and_corrections_come_at_once():
    gate = Gate()
    env = environment(gate)
    ticket, seen = call(env, [SEARCH, BROKEN, None], LEAVE)
    assert (ticket > 0).tolist() == [True, False, False]
    assert seen == [[], env.protocol.correction(INVALID_ACTION).ids, []]
    for want in (LEAVE, TAKE, AWAIT_ANY):
        again, seen = call(env, [None] * 3, want, ticket)
        assert again.tolist() == ticket.tolist() and seen == [[], [], []]
    gate.open.set()
    again, seen = call(env, [None] * 3, AWAIT_ALL, ticket)
    assert again.tolist() == [0, 0, 0]
    assert seen == [env.protocol.observe(Echo().retrieve(["a"], 2)[0], BUDGET).ids, [], []]
    counts = env.take_counts()
    assert (counts["host_calls"], counts["queries"], counts["invalid_actions"]) == (5, 1, 1)
    assert counts["retrieval_busy_seconds"] > 0 and counts["retrieval_seconds"] >= counts["retrieval_wait_seconds"] > 0
    assert counts["retrieval_errors"] == counts["retrieval_timeouts"] == 0
    assert not any(env.take_counts().values())


def test_an_answer_that_is_not_wanted_yet_is_left_even_if_it_is_there():
    env = environment()
    ticket, _ = call(env, [SEARCH], LEAVE)
    env._desk.wait(ticket.tolist(), 10, every=True)
    assert call(env, [None], LEAVE, ticket)[0].tolist() == ticket.tolist()
    assert call(env, [None], TAKE, ticket)[0].tolist() == [0]


@pytest.mark.parametrize("action", [SEARCH, BROKEN])
def test_an_observation_beyond_its_budget_is_left_empty(action):
    assert call(environment(), [action], AWAIT_ALL, budget=1)[1] == [[]]


def test_a_timeout_is_an_error_that_is_told_apart():
    gate = Gate()
    env = environment(gate, timeout_s=0.05)
    ticket, seen = call(env, [SEARCH, SEARCH], AWAIT_ALL)
    assert ticket.tolist() == [0, 0]
    assert seen == [env.protocol.correction(RETRIEVAL_FAILED).ids] * 2
    counts = env.take_counts()
    assert counts["retrieval_errors"] == counts["retrieval_timeouts"] == counts["queries"] == 2
    gate.open.set()


def test_a_call_never_raises():
    env = environment()
    env.begin([])  # no row has a question
    ticket, seen = call(env, [SEARCH, None], AWAIT_ALL)
    assert ticket.tolist() == [0, 0]
    assert seen == [env.protocol.correction(RETRIEVAL_FAILED).ids, []]
    assert env.take_counts()["retrieval_errors"] == 1


def test_a_corpus_without_a_retriever_is_told_before_it_starts():
    env = environment()
    env.retrievers = {"other": Echo()}
    with pytest.raises(KeyError, match="default"):
        env.begin(questions(1))
