"""Nearest-neighbour search over embeddings: a thin, deterministic wrapper of FAISS."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import faiss
import gin
import numpy as np
from absl import logging

from cipo_jax.errors import UserError
from cipo_jax.retrieval import memory
from cipo_jax.retrieval.store import write_atomically

# FAISS turns to BLAS at 20 queries, whose rounding depends on the batch; below that a query is scored alone, so its
# result does not depend on the queries beside it.
_QUERIES_PER_CALL = 16
_SPARE = 8  # neighbours fetched beyond top_k, so that ties at the border are settled by row
_INDEX_FILE, _DESCRIPTION = "index.faiss", "index.json"


@gin.configurable
@dataclasses.dataclass(frozen=True)
class IndexSpec:
    """What index to build and how to search it.

    Attributes:
      factory: a FAISS factory string: `Flat`, `IVF4096,SQ8`, `HNSW32`, ...
      train_rows: vectors sampled for training; 0 takes 64 per IVF centroid, and at least 65,536.
      nprobe: inverted lists visited per query (IVF).
      ef_construction: breadth of the search while an HNSW graph is built.
      ef_search: breadth of the search in an HNSW graph.
      threads: OpenMP threads, for building and per search; 0 leaves FAISS its default. 1 is fastest for small indices.
      batch_invariant: score few queries at a time, so that a result's bits do not depend on the queries beside it;
        False lets FAISS use BLAS over larger batches.
      seed: of the training sample.
    """

    factory: str = "Flat"
    train_rows: int = 0
    nprobe: int = 64
    ef_construction: int = 128
    ef_search: int = 128
    threads: int = 0
    batch_invariant: bool = True
    seed: int = 0


class VectorIndex:
    """Inner-product index whose row numbers are corpus rows.

    Args:
      index: a trained and filled FAISS index.
      spec: search parameters.
      facts: what `index.json` says of an index that was loaded.
    """

    def __init__(self, index: faiss.Index, spec: IndexSpec, facts: Mapping[str, Any] | None = None) -> None:
        self.spec, self.facts = spec, facts or {}
        self._index = index
        self._set_parameters()

    @classmethod
    def from_embeddings(cls, embeddings: np.ndarray, spec: IndexSpec | None = None) -> "VectorIndex":
        """Builds an index over `[N, D]` float32 embeddings in memory; one thread by default."""
        spec = spec or IndexSpec(threads=1)
        embeddings = np.ascontiguousarray(embeddings, np.float32)
        if embeddings.ndim != 2 or not embeddings.size:
            raise UserError(f"an index needs a non-empty [rows, dim] matrix, got shape {embeddings.shape}")
        return cls.build([(0, embeddings)], len(embeddings), embeddings.shape[1], embeddings, spec)

    @classmethod
    def build(
        cls, blocks: Iterable[tuple[int, np.ndarray]], rows: int, dim: int, sample: np.ndarray, spec: IndexSpec
    ) -> "VectorIndex":
        """Trains on `sample` `[n, dim]` and adds `blocks`, `(first row, [m, dim] float32)` in order."""
        index = memory.make_index(spec.factory, dim)
        inner = faiss.downcast_index(index)
        if isinstance(inner, faiss.IndexHNSW):
            inner.hnsw.efConstruction = spec.ef_construction
        if isinstance(inner, faiss.IndexIVF) and len(sample) < inner.nlist:
            raise UserError(
                f"index factory {spec.factory!r} has {inner.nlist} lists but only {len(sample)} vectors to train on; "
                f"use at most IVF{max(1, len(sample) // 39)}"
            )
        faiss.omp_set_num_threads(spec.threads or faiss.omp_get_max_threads())
        if not index.is_trained:
            index.train(np.ascontiguousarray(sample, np.float32))
        for first, block in blocks:
            if first != index.ntotal:
                raise ValueError(f"blocks must come in order: got row {first}, expected {index.ntotal}")
            index.add(np.ascontiguousarray(block, np.float32))
        if index.ntotal != rows:
            raise ValueError(f"{rows} rows were promised, {index.ntotal} came")
        return cls(index, spec)

    @classmethod
    def load(cls, folder: str | Path, spec: IndexSpec | None = None, mmap: bool = False) -> "VectorIndex":
        """Opens an index that `save` wrote.

        Args:
          folder: with `index.faiss` and `index.json`.
          spec: search parameters; those of the build if None. Its factory must be the built one.
          mmap: leave the vectors on disk and page them in as they are searched.

        Raises `UserError` when the folder has no index, was built otherwise, or needs more memory than there is.
        """
        folder = Path(folder)
        try:
            facts = json.loads((folder / _DESCRIPTION).read_text())
            built = IndexSpec(**facts["spec"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no index ({error}); make one with build_index") from None
        if spec is not None and spec.factory != built.factory:
            raise UserError(f"{folder} holds {built.factory!r}, not {spec.factory!r}; build it or choose its folder")
        path = folder / _INDEX_FILE
        if not mmap:
            mend = "set dense_retriever.mmap = True to leave it on disk, or build a smaller index (IndexSpec.factory)"
            logging.info(memory.preflight(f"index {path}", path.stat().st_size, mend))
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY if mmap else 0
        try:
            index = faiss.read_index(str(path), flags)
        except RuntimeError as error:
            raise UserError(f"{path} cannot be read ({str(error).splitlines()[-1][:200]}); build it again") from None
        return cls(index, spec or built, facts)

    def save(self, folder: str | Path, **facts: object) -> None:
        """Writes the index and its description, with `facts` in it; each file is whole or absent."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{_INDEX_FILE}.tmp"
        faiss.write_index(self._index, str(temporary))
        temporary.replace(folder / _INDEX_FILE)
        description = {"rows": len(self), "dim": self.dim, "spec": dataclasses.asdict(self.spec), **facts}
        write_atomically(folder / _DESCRIPTION, json.dumps(description, indent=1))

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
        if self.spec.threads:
            faiss.omp_set_num_threads(self.spec.threads)  # holds for the calling thread
        step = _QUERIES_PER_CALL if self.spec.batch_invariant else max(len(queries), 1)
        for start in range(0, len(queries), step):
            chunk = slice(start, start + step)
            scores[chunk], rows[chunk] = self._index.search(queries[chunk], fetched)
        rounded = np.where(rows < 0, np.inf, -np.round(scores.astype(np.float64), 6))
        order = np.lexsort((rows, rounded), axis=-1)[:, :wanted]
        return np.take_along_axis(scores, order, -1), np.take_along_axis(rows, order, -1)

    def _set_parameters(self) -> None:
        inner = faiss.downcast_index(self._index)
        while isinstance(inner, (faiss.IndexPreTransform, faiss.IndexRefine)):
            is_transform = isinstance(inner, faiss.IndexPreTransform)
            inner = faiss.downcast_index(inner.index if is_transform else inner.base_index)
        if isinstance(inner, faiss.IndexIVF):
            inner.nprobe = min(self.spec.nprobe, inner.nlist)
        elif isinstance(inner, faiss.IndexHNSW):
            inner.hnsw.efSearch = self.spec.ef_search


def index_folder(root: str | Path, factory: str) -> Path:
    """Where `build_index` puts an index: `index-IVF4096-SQ8` for `IVF4096,SQ8`."""
    safe = "".join(c if c.isalnum() or c in "_." else "-" for c in factory)
    return Path(root) / f"index-{safe}"


def train_rows(spec: IndexSpec, rows: int, dim: int) -> int:
    """How many vectors the index will be trained on; 0 when it needs no training."""
    index = memory.make_index(spec.factory, dim)
    if index.is_trained:
        return 0
    inner = faiss.downcast_index(index)
    wanted = spec.train_rows or max(65_536, 64 * inner.nlist if isinstance(inner, faiss.IndexIVF) else 0)
    return min(wanted, rows)
