"""Reciprocal-rank fusion of several retrievers over one corpus."""

import dataclasses
from collections.abc import Sequence

import gin

from cipo_jax.errors import UserError
from cipo_jax.retrieval.retriever import Passage, Retriever


@gin.configurable
class FusedRetriever:
    """Ranks passages by `sum over retrievers of weight / (constant + rank)`, ranks from 1 (Cormack et al., 2009).

    Args:
      retrievers: over the same corpus, each ordered by score.
      depth: passages asked of each; at least `top_k` are.
      constant: 60 in the paper; smaller favours the first ranks.
      weights: of each retriever; equal if None.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever] = gin.REQUIRED,
        depth: int = 100,
        constant: float = 60.0,
        weights: Sequence[float] | None = None,
    ):
        if not retrievers:
            raise UserError("FusedRetriever.retrievers is empty; give at least one retriever")
        if weights is not None and len(weights) != len(retrievers):
            raise UserError(f"FusedRetriever.weights={weights} must have one weight for each of {len(retrievers)}")
        self._retrievers, self._depth, self._constant = list(retrievers), depth, constant
        self._weights = list(weights) if weights is not None else [1.0] * len(retrievers)

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        answers = [r.retrieve(queries, max(top_k, self._depth)) for r in self._retrievers]
        return [self._fuse([answer[i] for answer in answers], top_k) for i in range(len(queries))]

    def passage(self, row: int) -> Passage:
        return self._retrievers[0].passage(row)

    def _fuse(self, rankings: Sequence[Sequence[Passage]], top_k: int) -> list[Passage]:
        scores: dict[int, float] = {}
        passages: dict[int, Passage] = {}
        for weight, ranking in zip(self._weights, rankings):
            for rank, passage in enumerate(ranking, 1):
                scores[passage.row] = scores.get(passage.row, 0.0) + weight / (self._constant + rank)
                passages.setdefault(passage.row, passage)
        best = sorted(scores, key=lambda row: (-scores[row], row))[:top_k]
        return [dataclasses.replace(passages[row], score=scores[row]) for row in best]
