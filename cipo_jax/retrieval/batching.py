"""Batches searches of many concurrent clients into few calls of a retriever."""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from absl import logging

from cipo_jax.retrieval.retriever import Passage, RetrievalError, Retriever


class Overloaded(Exception):
    """More queries wait than the batcher may hold."""


@dataclasses.dataclass
class _Request:
    queries: list[str]
    top_k: int
    answer: asyncio.Future


@dataclasses.dataclass
class BatchCounts:
    """What a batcher has done.

    Attributes:
      batches: calls of the retriever.
      queries: queries in them.
      failures: requests that the retriever failed.
      busy_s: seconds spent in the retriever, summed over workers.
    """

    batches: int = 0
    queries: int = 0
    failures: int = 0
    busy_s: float = 0.0


class Batcher:
    """Collects requests of one event loop while the workers are busy, and searches them together.

    Requests of different `top_k` are never mixed: the order of an answer may depend on it.

    Args:
      retriever: called from worker threads; with more than one worker it must be thread-safe.
      max_queries: per batch; a larger single request is searched alone.
      max_wait_s: how long an idle worker waits for more queries after the first.
      workers: batches searched at once.
      max_pending: queries that may wait; more raise `Overloaded`.
    """

    def __init__(
        self,
        retriever: Retriever,
        max_queries: int = 64,
        max_wait_s: float = 0.002,
        workers: int = 1,
        max_pending: int = 4096,
    ) -> None:
        self._retriever = retriever
        self._max_queries, self._max_wait_s, self._max_pending = max_queries, max_wait_s, max_pending
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="search")
        self._workers = workers
        self._waiting: deque[_Request] = deque()
        self._tasks: list[asyncio.Task] = []
        self._arrived = asyncio.Event()
        self.pending = 0
        self.counts = BatchCounts()

    def start(self) -> None:
        """Starts the workers on the running event loop."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]

    async def stop(self) -> None:
        """Lets running batches end, then fails whatever still waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._waiting:
            request = self._waiting.popleft()
            if not request.answer.done():
                request.answer.set_exception(RetrievalError("the server is shutting down", "connection"))
        self._pool.shutdown(wait=True)

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Answers as `Retriever.retrieve` does; raises what it raises, or `Overloaded`."""
        if not queries:
            return []
        if self.pending + len(queries) > self._max_pending and self.pending:
            raise Overloaded(f"{self.pending} queries are waiting")
        request = _Request(list(queries), top_k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.pending += len(queries)
        self._arrived.set()
        try:
            return await request.answer
        finally:
            self.pending -= len(queries)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if self._max_wait_s and sum(len(r.queries) for r in self._waiting) < self._max_queries:
                await asyncio.sleep(self._max_wait_s)
            batch = self._take()
            if not self._waiting:
                self._arrived.clear()
            if not batch:
                continue
            begin = time.monotonic()
            answers = await loop.run_in_executor(self._pool, self._search, batch)
            self.counts.busy_s += time.monotonic() - begin
            self.counts.batches += 1
            for request, answer in zip(batch, answers):
                self.counts.queries += len(request.queries)
                if request.answer.done():  # its client is gone
                    continue
                if isinstance(answer, Exception):
                    self.counts.failures += 1
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)

    def _take(self) -> list[_Request]:
        """The oldest request and those behind it that fit in its batch; the others keep their order."""
        batch: list[_Request] = []
        passed: deque[_Request] = deque()
        size = 0
        while self._waiting and size < self._max_queries:
            request = self._waiting.popleft()
            if request.answer.done():
                continue
            if batch and (request.top_k != batch[0].top_k or size + len(request.queries) > self._max_queries):
                passed.append(request)
                continue
            batch.append(request)
            size += len(request.queries)
        self._waiting.extendleft(reversed(passed))
        return batch

    def _search(self, batch: list[_Request]) -> list[list[list[Passage]] | Exception]:
        try:
            found = iter(self._retriever.retrieve([q for r in batch for q in r.queries], batch[0].top_k))
            return [[next(found) for _ in request.queries] for request in batch]
        except Exception as error:
            if len(batch) == 1:
                logging.exception("a search of %d queries failed", len(batch[0].queries))
                return [error]
            # One client's query must not fail the others': each request is tried by itself.
            return [self._search([request])[0] for request in batch]
