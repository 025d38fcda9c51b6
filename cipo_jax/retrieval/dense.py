"""The in-process dense retriever: embed, search, look up."""

import dataclasses
import hashlib
from collections.abc import Sequence

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import Corpus
from cipo_jax.retrieval.embedding import Embedder, SparseProjection
from cipo_jax.retrieval.index import IndexSpec, VectorIndex, index_folder
from cipo_jax.retrieval.retriever import Passage

ORDERS = ("score", "shuffled")
_OF_ENCODER = ("weights", "query_prefix", "passage_prefix", "pooling", "normalise")  # what queries and index must share


def query_rng(query: str, seed: int) -> np.random.Generator:
    """A generator that depends on the query's text and the seed alone, in every process."""
    digest = hashlib.blake2b(query.encode("utf-8", "surrogatepass"), key=str(seed).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@gin.configurable
class DenseRetriever:
    """Ranks the passages of a corpus by inner product with the query's embedding.

    Args:
      corpus: passages; row `i` of the index is passage `i`.
      embedder: embeds queries.
      index: the passages' embeddings.
      order: `score` shows the best passage first. `shuffled` shows the same top-k in an order drawn from the query's
        text and the seed, so that an agent cannot learn to read only the first passage (our choice).
      seed: of the shuffled order.
    """

    def __init__(
        self, corpus: Corpus, embedder: Embedder, index: VectorIndex, order: str = "score", seed: int = 0
    ) -> None:
        if order not in ORDERS:
            raise UserError(f"DenseRetriever.order={order!r} is not one of {', '.join(ORDERS)}")
        if len(index) != len(corpus):
            raise UserError(f"the index has {len(index)} rows but the corpus {len(corpus)}; build the index anew")
        if index.dim != embedder.dim:
            raise UserError(
                f"the index holds vectors of {index.dim} numbers but the encoder makes {embedder.dim}; use the encoder "
                "that the index was built with, or build it anew"
            )
        self.corpus, self.embedder, self.index = corpus, embedder, index
        self.order, self.seed = order, seed

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        if not queries or top_k < 1:
            return [[] for _ in queries]
        scores, rows = self.index.search(self.embedder.embed_queries(queries), top_k)
        results = []
        for query, query_scores, query_rows in zip(queries, scores.tolist(), rows.tolist()):
            found = [
                dataclasses.replace(self.corpus.passage(row), score=score)
                for row, score in zip(query_rows, query_scores)
                if row >= 0
            ]
            if self.order == "shuffled":
                found = [found[i] for i in query_rng(query, self.seed).permutation(len(found))]
            results.append(found)
        return results

    def passage(self, row: int) -> Passage:
        return self.corpus.passage(row)


@gin.configurable
def dense_retriever(
    corpus: Corpus = gin.REQUIRED,
    embedder: Embedder = gin.REQUIRED,
    folder: str = gin.REQUIRED,
    spec: IndexSpec | None = None,
    mmap: bool = False,
    order: str = "score",
    seed: int = 0,
) -> DenseRetriever:
    """Opens what `build_index` made.

    Args:
      corpus: passages the index was built over.
      embedder: the encoder it was built with; another one is a `UserError`.
      folder: `build_index.folder`.
      spec: which of its indices, and how to search it; `Flat` if None.
      mmap: leave the vectors on disk and page them in as they are searched.
      order: see `DenseRetriever`.
      seed: of the shuffled order.
    """
    spec = spec or IndexSpec()
    index = VectorIndex.load(index_folder(folder, spec.factory), spec, mmap)
    retriever = DenseRetriever(corpus, embedder, index, order, seed)
    used, built = getattr(embedder, "fingerprint", {}), index.facts.get("encoder", {})
    for name in _OF_ENCODER:
        if used.get(name) != built.get(name, used.get(name)):
            raise UserError(
                f"the index in {folder} was built by an encoder with another {name} ({built[name]!r}, now "
                f"{used.get(name)!r}); use that encoder, or build the index anew in another folder"
            )
    embedder.warm_up()
    return retriever


@gin.configurable
def sparse_retriever(
    corpus: Corpus, dim: int = 512, idf_clip: float = 2.0, order: str = "score", seed: int = 0
) -> DenseRetriever:
    """A model-free retriever over a small in-memory corpus, built in one call.

    Args:
      corpus: passages; a thousand embed in a tenth of a second.
      dim: size of the embedding.
      idf_clip: see `SparseProjection`.
      order: see `DenseRetriever`.
      seed: of the projection and of the shuffled order.
    """
    if not len(corpus):
        raise UserError("a retriever needs a corpus of at least one passage, got an empty one")
    texts = [corpus.passage(row).contents for row in range(len(corpus))]
    embedder = SparseProjection(dim, idf_clip, seed).fit(texts)
    return DenseRetriever(corpus, embedder, VectorIndex.from_embeddings(embedder.embed_passages(texts)), order, seed)
