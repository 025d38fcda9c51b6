"""A large index from few real embeddings: memory, recall and speed, extrapolated to wiki-18.

    python -m cipo_jax.benchmarks.retrieval_scale --embeddings=INDEX_FOLDER/embeddings --scratch=FOLDER --json=out.json

Writes `--rows` vectors (real embeddings, resampled, plus seeded Gaussian noise, unit length) into an embedding store,
builds `--factory` in one process and serves it in another, and reports the peak resident memory of each. Recall is
taken on further noisy embeddings and, with --encoder and --questions, on real questions, whose neighbours are spread over
more lists.
"""

import json
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from cipo_jax.benchmarks.report import write_report
from cipo_jax.data.questions import load_questions
from cipo_jax.retrieval.build import exact_search, index_from_store, recall
from cipo_jax.retrieval.encoder import BertEmbedder
from cipo_jax.retrieval.index import IndexSpec, VectorIndex, train_rows
from cipo_jax.retrieval.memory import GIB, index_memory
from cipo_jax.retrieval.store import EmbeddingStore, digest

FLAGS = flags.FLAGS
flags.DEFINE_string("embeddings", None, "Embedding store of real passages.", required=True)
flags.DEFINE_string("scratch", None, "Folder for the large store and index.", required=True)
flags.DEFINE_integer("rows", 1_000_000, "Vectors.")
flags.DEFINE_float("noise", 0.5, "Norm of the noise added to a unit vector.")
flags.DEFINE_string("factory", "IVF4096,SQ8", "Index to build.")
flags.DEFINE_multi_integer("nprobe", [16, 32, 64, 128], "Lists visited.")
flags.DEFINE_multi_integer("batch", [1, 16, 64], "Queries per call.")
flags.DEFINE_integer("queries", 512, "Held-out noisy embeddings that recall is taken on.")
flags.DEFINE_string("encoder", None, "Folder of the encoder, for --questions.")
flags.DEFINE_multi_string("questions", [], "Question sets in FlashRAG's format; the first --queries of each.")
flags.DEFINE_integer("threads", 2, "FAISS threads.")
flags.DEFINE_string("json", None, "File for the numbers.")

WIKI18_ROWS, WIKI18_DIM = 21_015_324, 768


def _noisy(real: np.ndarray, count: int, noise: float, rng: np.random.Generator) -> np.ndarray:
    vectors = real[rng.integers(0, len(real), count)]
    vectors = vectors + rng.normal(size=vectors.shape).astype(np.float32) * np.float32(noise / np.sqrt(real.shape[1]))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _make(source: str, folder: str, rows: int, noise: float) -> None:
    store = EmbeddingStore.open(source)
    real = store.read(0, store.rows)
    large = EmbeddingStore.create(folder, rows, store.dim, {"noise": noise}, chunk_rows=65_536)
    for chunk in range(large.chunks):
        if chunk not in large.declared():
            start, stop = large.bounds(chunk)
            large.write(chunk, _noisy(real, stop - start, noise, np.random.default_rng([1, chunk])), digest(b""))


def _build(folder: str, index_folder: str, spec: IndexSpec, pipe) -> None:
    begin = time.monotonic()
    index = index_from_store(EmbeddingStore.open(folder), spec)
    index.save(index_folder)
    pipe.send({"seconds": time.monotonic() - begin, "peak_resident_gib": _peak_gib()})


def _exact(folder: str, sets: dict[str, np.ndarray], pipe) -> None:
    store = EmbeddingStore.open(folder)
    pipe.send({name: exact_search(store, queries, 10) for name, queries in sets.items()})


def _serve(index_folder, sets, exact, factory, threads, nprobes, batches, pipe) -> None:
    begin = time.monotonic()
    result: dict = {"nprobe": {}}
    for nprobe in nprobes:
        spec = IndexSpec(factory, nprobe=nprobe, threads=threads)
        index = VectorIndex.load(index_folder, spec)
        result.setdefault("load_seconds", time.monotonic() - begin)
        entry = {"recall_at_10": {name: recall(index.search(sets[name], 10)[1], exact[name]) for name in sets}}
        queries = sets["noisy passages"]
        for batch in batches:
            seconds = []
            for _ in range(3):
                begin = time.monotonic()
                for start in range(0, 256, batch):
                    index.search(queries[start : start + batch], 10)
                seconds.append(time.monotonic() - begin)
            entry[f"queries_per_second_batch_{batch}"] = 256 / sorted(seconds)[1]
        result["nprobe"][nprobe] = entry
        del index
    result["peak_resident_gib"] = _peak_gib()
    pipe.send(result)


def _in_process(target, *arguments):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _extrapolation(report: dict, rows: int, dim: int) -> list[dict]:
    """Time per vector grows with dim; training does not grow with rows."""
    scale = WIKI18_ROWS * WIKI18_DIM / (rows * dim)
    table = []
    for factory in ("Flat", "IVF4096,SQ8", "HNSW32"):
        sample = train_rows(IndexSpec(factory), WIKI18_ROWS, WIKI18_DIM)
        estimate = index_memory(factory, WIKI18_ROWS, WIKI18_DIM, sample)
        row = {
            "factory": factory,
            "serving_gb": estimate.serving / 1e9,
            "building_gb": estimate.building / 1e9,
            "published_gb": {"Flat": 65, "IVF4096,SQ8": 16}.get(factory),
        }
        if factory == report["factory"]:
            row["build_hours_on_these_cores"] = report["build"]["seconds"] * scale / 3600
            row["queries_per_second_batch_64_on_these_cores"] = {
                nprobe: entry["queries_per_second_batch_64"] / scale
                for nprobe, entry in report["serve"]["nprobe"].items()
                if "queries_per_second_batch_64" in entry
            }
        table.append(row)
    return table


def main(_) -> None:
    scratch = Path(FLAGS.scratch)
    folder, index_folder = str(scratch / "store"), str(scratch / "index")
    _make(FLAGS.embeddings, folder, FLAGS.rows, FLAGS.noise)
    store = EmbeddingStore.open(FLAGS.embeddings)
    sets = {"noisy passages": _noisy(store.read(0, store.rows), FLAGS.queries, FLAGS.noise, np.random.default_rng(2))}
    if FLAGS.questions:
        embedder = BertEmbedder(FLAGS.encoder)
        for path in FLAGS.questions:
            questions = load_questions(path)[: FLAGS.queries]
            sets[Path(path).stem] = embedder.embed_queries([q.question for q in questions])
    spec = IndexSpec(FLAGS.factory, threads=FLAGS.threads)
    report: dict = {"rows": FLAGS.rows, "dim": store.dim, "factory": FLAGS.factory, "noise": FLAGS.noise}
    estimate = index_memory(FLAGS.factory, FLAGS.rows, store.dim, train_rows(spec, FLAGS.rows, store.dim))
    report["estimated_gib"] = {"serving": estimate.serving / GIB, "building": estimate.building / GIB}
    report["build"] = _in_process(_build, folder, index_folder, spec)
    report["index_file_gib"] = os.path.getsize(Path(index_folder, "index.faiss")) / GIB
    exact = _in_process(_exact, folder, sets)
    report["serve"] = _in_process(
        _serve, index_folder, sets, exact, FLAGS.factory, FLAGS.threads, FLAGS.nprobe, FLAGS.batch
    )
    report["wiki18"] = _extrapolation(report, FLAGS.rows, store.dim)
    write_report(json.loads(json.dumps(report)), FLAGS.json)


if __name__ == "__main__":
    app.run(main)
