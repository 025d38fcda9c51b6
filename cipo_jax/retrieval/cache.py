"""A bounded cache in front of any retriever."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import gin

from cipo_jax.errors import UserError
from cipo_jax.retrieval.retriever import Passage, Retriever


@gin.configurable
class CachedRetriever:
    """Remembers the answers of another retriever, keyed by the query's exact text and `top_k`.

    Failures are not remembered. Of a query that occurs several times in one call only one is searched.

    Args:
      retriever: answers what is not remembered.
      capacity: answers kept; the least recently used is dropped first.

    Attributes:
      hits, misses: queries answered from memory, and searched.
    """

    def __init__(self, retriever: Retriever = gin.REQUIRED, capacity: int = 100_000):
        if capacity < 1:
            raise UserError(f"CachedRetriever.capacity={capacity} must be at least 1")
        self._retriever, self._capacity = retriever, capacity
        self._answers: OrderedDict[tuple[str, int], tuple[Passage, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        known: dict[str, tuple[Passage, ...]] = {}
        with self._lock:
            for query in queries:
                if (query, top_k) in self._answers:
                    self._answers.move_to_end((query, top_k))
                    known[query] = self._answers[query, top_k]
        unknown = [query for query in dict.fromkeys(queries) if query not in known]
        if unknown:  # outside the lock: other threads go on
            for query, passages in zip(unknown, self._retriever.retrieve(unknown, top_k)):
                known[query] = tuple(passages)
        with self._lock:
            self.misses += len(unknown)
            self.hits += len(queries) - len(unknown)
            for query in unknown:
                self._answers[query, top_k] = known[query]
            while len(self._answers) > self._capacity:
                self._answers.popitem(last=False)
        return [list(known[query]) for query in queries]

    def passage(self, row: int) -> Passage:
        return self._retriever.passage(row)

    def __len__(self) -> int:
        return len(self._answers)
