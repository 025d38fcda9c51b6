"""What an agent gets back from a search, and the interface every retriever offers."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Passage:
    """One passage of a corpus.

    Attributes:
      row: position in its corpus, from 0; what `Trajectories.passage_row` holds.
      id: the identifier written in the corpus file.
      title: may be empty.
      text: the passage without its title.
      score: what the retriever ranked by, larger is better; 0 for a passage looked up by row.
    """

    row: int
    id: str
    title: str
    text: str
    score: float = 0.0

    @property
    def contents(self) -> str:
        """Title and text in one string, as Search-R1 corpora write them: `"Title"\\ntext`, quotes in it doubled."""
        title = self.title.replace('"', '""')
        return f'"{title}"\n{self.text}' if title else self.text


class RetrievalError(Exception):
    """A search failed. The rollout turns it into an observation and a count; it never ends a run.

    Attributes:
      kind: a short stable name of the failure (`timeout`, `connection`, `status`, `malformed`, `circuit_open`,
        `internal`), under which it is counted.
    """

    def __init__(self, message: str, kind: str = "internal"):
        super().__init__(message)
        self.kind = kind


@runtime_checkable
class Retriever(Protocol):
    """Anything that answers queries with passages of one corpus."""

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns at most `top_k` passages per query, in the order they should be shown.

        The answer to a query does not depend on the queries beside it. Raises `RetrievalError`.
        """
        ...

    def passage(self, row: int) -> Passage:
        """Returns the passage in `row`; `IndexError` when the corpus has no such row."""
        ...
