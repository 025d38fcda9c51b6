"""Searches on threads: tickets, batches, time-outs, and threads that never come back."""

import threading
import time

from cipo_jax.rollout.host import SearchDesk


def take_all(desk, tickets, seconds=5.0):
    desk.wait(tickets, seconds, every=True)
    return [desk.take(ticket) for ticket in tickets]


def test_answers_belong_to_their_tickets():
    desk = SearchDesk(lambda corpus, queries: [f"{corpus}:{q}" for q in queries], 5.0, 2)
    first = desk.submit([("a", "1"), ("b", "2")])
    second = desk.submit([("a", "3")])
    assert min(first + second) > 0 and len({*first, *second}) == 3
    assert take_all(desk, second + first) == [(False, "a:3"), (False, "a:1"), (False, "b:2")]
    assert desk.take(first[0]) == (False, None)  # taken twice: it has failed, nobody waits


def test_queries_that_arrive_while_all_workers_are_busy_go_out_together():
    go, batches = threading.Event(), []

    def retrieve(corpus, queries):
        batches.append((corpus, len(queries)))
        go.wait(5)
        return queries

    desk = SearchDesk(retrieve, 5.0, 1)
    tickets = desk.submit([("a", "0")])
    while not batches:
        time.sleep(0.001)
    for i in range(3):
        tickets += desk.submit([("a", str(i)), ("b", str(i))])
    assert desk.take(tickets[0]) is None
    go.set()
    assert all(answer is not None for answer in take_all(desk, tickets))
    assert batches == [("a", 1), ("a", 3), ("b", 3)]


def test_waiting_for_any_ends_with_the_first_and_is_bounded():
    go = threading.Event()
    desk = SearchDesk(lambda corpus, queries: queries if corpus == "fast" or go.wait(5) else [], 5.0, 2)
    slow, fast = desk.submit([("slow", "1"), ("fast", "2")])
    desk.wait([slow, fast], 5.0, every=False)
    assert desk.take(fast) == (False, "2") and desk.take(slow) is None
    begin = time.monotonic()
    desk.wait([slow], 0.05, every=True)
    assert 0.04 < time.monotonic() - begin < 2.0
    go.set()
    assert take_all(desk, [slow]) == [(False, "1")]


def test_a_hanging_worker_costs_a_timeout_and_is_replaced():
    hung = threading.Event()

    def retrieve(corpus, queries):
        if corpus == "hangs":
            hung.wait()
        return queries

    desk = SearchDesk(retrieve, 0.1, 1)
    assert take_all(desk, desk.submit([("hangs", "1")])) == [(True, None)]
    assert take_all(desk, desk.submit([("fine", "2")])) == [(False, "2")]
    hung.set()


def test_a_thread_that_is_told_to_exit_owes_its_answers():
    def retrieve(corpus, queries):
        raise SystemExit

    desk = SearchDesk(retrieve, 5.0, 1)
    for _ in range(3):
        assert take_all(desk, desk.submit([("a", "1"), ("a", "2")])) == [(False, None)] * 2


def test_clearing_forgets():
    go = threading.Event()
    desk = SearchDesk(lambda corpus, queries: queries if go.wait(5) else [], 5.0, 1)
    (old,) = desk.submit([("a", "1")])
    desk.clear()
    go.set()
    assert desk.take(old) == (False, None)
    assert take_all(desk, desk.submit([("a", "2")])) == [(False, "2")]
