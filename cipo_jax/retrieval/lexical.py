"""BM25 over a corpus, through bm25s (extra `bm25`)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import Corpus
from cipo_jax.retrieval.retriever import Passage

_SPARE = 8
_DESCRIPTION = "cipo.json"


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise UserError("BM25 needs the package bm25s; pip install 'cipo_jax[bm25]'") from None
    return bm25s


@gin.configurable
class Bm25Retriever:
    """Ranks passages by BM25 over lower-cased words, English stop words dropped.

    The index is built in memory at first use (about as large as the corpus's text) and kept in `folder` when one is
    given, from where it is mapped the next time.

    Args:
      corpus: passages.
      folder: keeps the index; None builds anew each time.
      k1, b: BM25's parameters (Lucene's variant).
    """

    def __init__(
        self, corpus: Corpus = gin.REQUIRED, folder: str | None = None, k1: float = 0.9, b: float = 0.4
    ) -> None:
        if not len(corpus):
            raise UserError("a retriever needs a corpus of at least one passage, got an empty one")
        self.corpus = corpus
        facts = {"rows": len(corpus), "k1": k1, "b": b}
        path = Path(folder) if folder else None
        if path and (path / _DESCRIPTION).is_file():
            found = json.loads((path / _DESCRIPTION).read_text())
            if found != facts:
                raise UserError(
                    f"{path} holds a BM25 index with {found}, not {facts}; delete it or choose another folder"
                )
            self._index = _bm25s().BM25.load(path, mmap=True)
            return
        texts = [corpus.passage(row).contents for row in range(len(corpus))]
        self._index = _bm25s().BM25(k1=k1, b=b, method="lucene")
        self._index.index(self._tokens(texts), show_progress=False)
        if path:
            self._index.save(path)
            (path / _DESCRIPTION).write_text(json.dumps(facts))

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        if not queries or top_k < 1:
            return [[] for _ in queries]
        fetched = min(top_k + _SPARE, len(self.corpus))
        results = []
        for query in queries:
            words = self._tokens([query], ids=False)[0]
            if not any(word in self._index.vocab_dict for word in words):
                results.append([])
                continue
            rows, scores = (a[0] for a in self._index.retrieve([words], k=fetched, show_progress=False))
            order = np.lexsort((rows, -np.round(scores.astype(np.float64), 6)))[:top_k]
            results.append(
                [
                    dataclasses.replace(self.corpus.passage(int(rows[i])), score=float(scores[i]))
                    for i in order
                    if scores[i] > 0
                ]
            )
        return results

    def passage(self, row: int) -> Passage:
        return self.corpus.passage(row)

    @staticmethod
    def _tokens(texts: Sequence[str], ids: bool = True):
        return _bm25s().tokenize(list(texts), stopwords="en", return_ids=ids, show_progress=False)
