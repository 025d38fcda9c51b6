"""From a corpus to a searchable index on disk: embed, train, add, measure recall."""

import json
import time
from pathlib import Path

import gin
import jax
import numpy as np
from jax.experimental import multihost_utils

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import Corpus
from cipo_jax.retrieval.embed_corpus import Progress, embed_corpus
from cipo_jax.retrieval.encoder import BertEmbedder
from cipo_jax.retrieval.index import IndexSpec, VectorIndex, index_folder, train_rows
from cipo_jax.retrieval.memory import index_memory, preflight
from cipo_jax.retrieval.store import EmbeddingStore

_TIES = 16  # candidates kept beyond top_k in each chunk, for equal scores at the border


def say(text: str) -> None:
    """Default of every `tell` below: a line on stdout at once."""
    print(text, flush=True)


@gin.configurable
def build_index(
    corpus: Corpus = gin.REQUIRED,
    embedder: BertEmbedder = gin.REQUIRED,
    folder: str = gin.REQUIRED,
    specs: tuple[IndexSpec, ...] = (IndexSpec(),),
    chunk_rows: int = 4096,
    dtype: str = "float32",
    verify: bool = True,
    recall_queries: int = 256,
    tell=say,
) -> dict[str, object]:
    """Builds everything a retriever needs, resuming what an earlier call left, and returns the numbers it told.

    On several hosts, which must share `folder`, each encodes its part and the first one builds the indices.

    Args:
      corpus: passages.
      embedder: encodes them, and sample queries for the recall.
      folder: gets `embeddings/` (an `EmbeddingStore`) and one folder per index, named by `index_folder`.
      specs: indices to build over the same embeddings.
      chunk_rows: passages encoded between two commits.
      dtype: of the stored embeddings; `float16` halves them.
      verify: compare embeddings left by an earlier call with their checksums and texts.
      recall_queries: queries (titles of sampled passages) whose exact neighbours are compared with each index; 0: none.
      tell: called with lines of progress.
    """
    if not len(corpus):
        raise UserError("the corpus has no passages; give a file with at least one")
    root = Path(folder)
    for spec in specs:
        estimate = index_memory(spec.factory, len(corpus), embedder.dim, train_rows(spec, len(corpus), embedder.dim))
        tell(preflight(f"building {spec.factory} over {len(corpus)} x {embedder.dim}", estimate.building))
    begin = time.monotonic()
    store = embed_corpus(
        corpus, embedder, str(root / "embeddings"), chunk_rows, dtype, verify, progress=progress_line(tell)
    )
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("corpus embedded")
        if jax.process_index() > 0:
            return {"passages": len(corpus)}
    numbers: dict[str, object] = {
        "passages": len(corpus),
        "embedding_checksum": store.checksum(),
        "embed_seconds": time.monotonic() - begin,
        "indices": {},
    }
    tell(f"embeddings complete after {numbers['embed_seconds']:.1f} s, checksum {numbers['embedding_checksum']}")
    queries = sample_queries(corpus, embedder, recall_queries) if recall_queries else None
    exact = exact_search(store, queries, 10) if queries is not None else None
    for spec in specs:
        begin = time.monotonic()
        index = index_from_store(store, spec)
        seconds = time.monotonic() - begin
        facts: dict[str, object] = {"build_seconds": seconds, "embedding_checksum": numbers["embedding_checksum"]}
        if queries is not None:
            begin = time.monotonic()
            found = index.search(queries, 10)[1]
            facts["queries_per_second"] = len(queries) / (time.monotonic() - begin)
            facts["recall_at_10"] = recall(found, exact)
        index.save(index_folder(root, spec.factory), encoder=embedder.fingerprint, **facts)
        numbers["indices"][spec.factory] = facts
        quoted = f", recall@10 {facts['recall_at_10']:.4f} of exact" if queries is not None else ""
        tell(f"{spec.factory}: built in {seconds:.1f} s{quoted}")
    return json.loads(json.dumps(numbers))


def index_from_store(store: EmbeddingStore, spec: IndexSpec) -> VectorIndex:
    """Builds an index from stored embeddings, one chunk in memory at a time besides the training sample."""
    wanted = train_rows(spec, store.rows, store.dim)
    rng = np.random.default_rng(spec.seed)
    sample = np.zeros((0, store.dim), np.float32)
    if wanted:
        sample = store.read_rows(np.sort(rng.choice(store.rows, wanted, replace=False)))
    return VectorIndex.build(store.blocks(), store.rows, store.dim, sample, spec)


def exact_search(store: EmbeddingStore, queries: np.ndarray, top_k: int) -> np.ndarray:
    """Returns the `[Q, top_k]` rows of largest inner product, chunk by chunk; equal scores by row."""
    best_scores = np.zeros((len(queries), 0), np.float32)
    best_rows = np.zeros((len(queries), 0), np.int64)
    for first, block in store.blocks():
        scores = queries @ block.T
        kept = min(top_k + _TIES, len(block))
        found = np.sort(np.argpartition(-scores, kept - 1, axis=-1)[:, :kept], axis=-1)
        scores = np.concatenate([best_scores, np.take_along_axis(scores, found, -1)], axis=1)
        rows = np.concatenate([best_rows, first + found], axis=1)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]  # rows ascend, so ties go to the first
        best_scores, best_rows = np.take_along_axis(scores, order, -1), np.take_along_axis(rows, order, -1)
    return best_rows


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """The share of `exact` `[Q, k]` rows that are among `found` `[Q, >= k]`."""
    hits = [len(set(f) & set(e)) / len(e) for f, e in zip(found.tolist(), exact.tolist())]
    return float(np.mean(hits))


def sample_queries(corpus: Corpus, embedder: BertEmbedder, count: int, seed: int = 0) -> np.ndarray:
    """Embeds the titles (or first words) of sampled passages as queries: `[n, dim]` float32."""
    rows = np.random.default_rng(seed).choice(len(corpus), min(count, len(corpus)), replace=False)
    passages = [corpus.passage(int(row)) for row in rows]
    return embedder.embed_queries([p.title or " ".join(p.text.split()[:12]) for p in passages])


def progress_line(tell, every: float = 10.0) -> Progress:
    """A progress callback that tells passages done, per second, and the time left, at most every `every` seconds."""
    last = [float("-inf")]

    def report(done: int, total: int, per_second: float) -> None:
        now = time.monotonic()
        if now - last[0] >= every or done == total:
            last[0] = now
            left = (total - done) / per_second
            tell(f"embedded {done:,} of {total:,} passages, {per_second:,.1f} per second, {duration(left)} left")

    return report


def duration(seconds: float) -> str:
    """`75` as `1m15s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
