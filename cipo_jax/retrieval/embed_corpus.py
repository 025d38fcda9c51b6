"""The encoder driver: every passage of a corpus into an embedding store, chunk by chunk, resumable."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax

from cipo_jax.retrieval.corpus import Corpus
from cipo_jax.retrieval.encoder import BertEmbedder
from cipo_jax.retrieval.store import EmbeddingStore, digest

Progress = Callable[[int, int, float], None]


def embed_corpus(
    corpus: Corpus,
    embedder: BertEmbedder,
    folder: str,
    chunk_rows: int = 4096,
    dtype: str = "float32",
    verify: bool = True,
    progress: Progress | None = None,
) -> EmbeddingStore:
    """Fills the store in `folder` with the embeddings of a corpus and returns it.

    Chunks that an earlier call finished are kept. On several hosts each process encodes its own chunks; call
    `EmbeddingStore.checksum` after all are done.

    Args:
      corpus: passages.
      embedder: encodes them; another one than the store was begun with is a `UserError`.
      folder: of the store.
      chunk_rows: rows encoded between two commits; lengths are sorted within a chunk.
      dtype: of the stored embeddings.
      verify: compare finished chunks with their checksums, and their texts with the corpus, before they are kept.
      progress: called after each batch with `(rows done, rows, passages per second of this call)`.
    """
    process, processes = jax.process_index(), jax.process_count()
    fingerprint = embedder.fingerprint
    store = EmbeddingStore.create(folder, len(corpus), embedder.dim, fingerprint, chunk_rows, dtype, process)

    def texts_of(chunk: int) -> list[str]:
        return [corpus.passage(row).contents for row in range(*store.bounds(chunk))]

    mine = range(process, store.chunks, processes)
    declared = store.declared()
    kept = {c for c in mine if c in declared and (not verify or _still_true(store, c, declared[c], texts_of(c)))}
    todo = [c for c in mine if c not in kept]
    rows = sum(stop - start for start, stop in map(store.bounds, mine))
    done = sum(stop - start for start, stop in map(store.bounds, kept))
    encoded, begin = 0, time.monotonic()

    def report(rows_encoded: int) -> None:
        if progress:
            progress(done + rows_encoded, rows, rows_encoded / (time.monotonic() - begin))

    def prepare(chunk: int) -> tuple[int, str, list[list[int]]]:
        texts = texts_of(chunk)
        return chunk, _texts_digest(texts), embedder.tokenise_passages(texts)

    with ThreadPoolExecutor(1) as pool:  # the next chunk is read and tokenised while this one is encoded
        ahead = pool.submit(prepare, todo[0]) if todo else None
        for following in [*todo[1:], None] if todo else []:
            chunk, texts_digest, ids = ahead.result()
            ahead = pool.submit(prepare, following) if following is not None else None
            store.write(chunk, embedder.embed_ids(ids, lambda n, before=encoded: report(before + n)), texts_digest)
            encoded += len(ids)
            report(encoded)
    return store


def _texts_digest(texts: list[str]) -> str:
    return digest("\0".join(texts).encode("utf-8", "surrogatepass"))


def _still_true(store: EmbeddingStore, chunk: int, entry: dict, texts: list[str]) -> bool:
    return entry["texts"] == _texts_digest(texts) and store.intact(chunk, entry)
