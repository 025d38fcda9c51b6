"""Searches that run beside the rollout: handed in, answered on threads, asked for later."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(eq=False)
class _Search:
    """One query on its way."""

    corpus: str
    query: str
    deadline: float
    done: bool = False
    answer: Any = None


@dataclasses.dataclass(eq=False)
class _Worker:
    """A thread and until when it may take; one that overstays is given up and replaced."""

    deadline: float = float("inf")


class SearchDesk:
    """Answers searches on threads of its own. Queries that arrive while all workers are busy go out together.

    Threads are daemons: one that never comes back costs its searches a time-out, holds up nobody and does not keep the
    process alive.

    Args:
      retrieve: called with a corpus and its queries; returns one answer each, None for one that failed. Must not raise.
      timeout_s: a search not answered within this counts as failed.
      workers: calls of `retrieve` at once.
    """

    def __init__(self, retrieve: Callable[[str, list[str]], Sequence[Any]], timeout_s: float, workers: int):
        self._retrieve, self._timeout_s, self._limit = retrieve, timeout_s, workers
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._searches: dict[int, _Search] = {}  # by ticket
        self._waiting: list[_Search] = []
        self._workers: set[_Worker] = set()

    def clear(self) -> None:
        """Forgets all searches; answers that still come are dropped."""
        with self._changed:
            self._searches.clear()
            self._waiting.clear()

    def submit(self, asked: Sequence[tuple[str, str]]) -> list[int]:
        """Takes `(corpus, query)` pairs and returns their tickets, positive numbers, at once."""
        with self._changed:
            deadline = time.monotonic() + self._timeout_s
            searches = [_Search(corpus, query, deadline) for corpus, query in asked]
            tickets = [next(self._numbers) for _ in searches]
            self._searches.update(zip(tickets, searches))
            self._waiting += searches
            self._staff()
        return tickets

    def wait(self, tickets: Sequence[int], seconds: float, every: bool) -> None:
        """Returns when all `tickets` (or any, if not `every`) can be taken, or after `seconds`."""
        together = all if every else any
        until = time.monotonic() + seconds
        with self._changed:
            while tickets and not together(self._over(ticket) for ticket in tickets):
                now = time.monotonic()
                if now >= until:
                    return
                deadlines = [self._searches[ticket].deadline for ticket in tickets if not self._over(ticket)]
                self._changed.wait(max(min([until, *deadlines]) - now, 0.0))

    def take(self, ticket: int) -> tuple[bool, Any] | None:
        """None while the search is under way, else `(timed out, answer)`, once; an unknown ticket has failed."""
        with self._changed:
            if not self._over(ticket):
                return None
            search = self._searches.pop(ticket, None)
            if search is None:
                return False, None
            if not search.done:
                if search in self._waiting:
                    self._waiting.remove(search)
                self._staff()  # its worker hangs
            return not search.done, search.answer

    def _over(self, ticket: int) -> bool:
        search = self._searches.get(ticket)
        return search is None or search.done or time.monotonic() >= search.deadline

    def _staff(self) -> None:
        """Starts as many workers as there is work for; the lock is held."""
        now = time.monotonic()
        self._workers = {worker for worker in self._workers if now < worker.deadline}
        corpora = len({search.corpus for search in self._waiting})
        for _ in range(min(corpora, self._limit - len(self._workers))):
            worker = _Worker()
            self._workers.add(worker)
            threading.Thread(target=self._work, args=(worker,), name="search", daemon=True).start()

    def _work(self, worker: _Worker) -> None:
        while True:
            with self._changed:
                if not self._waiting or worker not in self._workers:
                    self._workers.discard(worker)
                    return
                corpus = self._waiting[0].corpus
                batch = [search for search in self._waiting if search.corpus == corpus]
                self._waiting = [search for search in self._waiting if search.corpus != corpus]
                worker.deadline = max(search.deadline for search in batch)
            try:
                answers = self._retrieve(corpus, [search.query for search in batch])
            except BaseException:  # even a thread that was told to end owes its answers
                answers = [None] * len(batch)
            with self._changed:
                for search, answer in zip(batch, answers):
                    search.done, search.answer = True, answer
                worker.deadline = float("inf")
                self._changed.notify_all()
