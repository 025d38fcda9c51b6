"""Nearest-neighbour search over embeddings: a thin, deterministic wrapper of FAISS."""

import faiss
import gin
import numpy as np

from cipo_jax.errors import UserError

# FAISS turns to BLAS at 20 queries, whose rounding depends on the batch; below that a query is scored alone, so its
# result does not depend on the queries beside it.
_QUERIES_PER_CALL = 16
_SPARE = 8  # neighbours fetched beyond top_k, so that ties at the border are settled by row


@gin.configurable
class VectorIndex:
    """Inner-product index over rows of float32 embeddings.

    Args:
      embeddings: `[N, D]` float32; row numbers are the corpus rows.
      factory: a FAISS factory string.
      threads: OpenMP threads per search; 1 is fastest for small indices.
    """

    def __init__(self, embeddings: np.ndarray, factory: str = "Flat", threads: int = 1):
        embeddings = np.ascontiguousarray(embeddings, np.float32)
        if embeddings.ndim != 2 or not embeddings.size:
            raise UserError(f"an index needs a non-empty [rows, dim] matrix, got shape {embeddings.shape}")
        self.threads = threads
        self._index = faiss.index_factory(embeddings.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        self._index.train(embeddings)
        self._index.add(embeddings)

    def __len__(self) -> int:
        return self._index.ntotal

    @property
    def dim(self) -> int:
        return self._index.d

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the rows with the largest inner products.

        Args:
          queries: `[Q, D]` float32.
          top_k: rows wanted per query.

        Returns:
          `(scores [Q, k] float32, rows [Q, k] int64)` with `k = min(top_k, N)`, best first, equal scores (to six
          decimals) by row; row -1 where the index found fewer.
        """
        queries = np.ascontiguousarray(queries, np.float32)
        wanted = min(top_k, len(self))
        fetched = min(wanted + _SPARE, len(self))
        scores = np.zeros((len(queries), fetched), np.float32)
        rows = np.full((len(queries), fetched), -1, np.int64)
        faiss.omp_set_num_threads(self.threads)  # per calling thread
        for start in range(0, len(queries), _QUERIES_PER_CALL):
            chunk = slice(start, start + _QUERIES_PER_CALL)
            scores[chunk], rows[chunk] = self._index.search(queries[chunk], fetched)
        rounded = np.where(rows < 0, np.inf, -np.round(scores.astype(np.float64), 6))
        order = np.lexsort((rows, rounded), axis=-1)[:, :wanted]
        return np.take_along_axis(scores, order, -1), np.take_along_axis(rows, order, -1)
