"""Index types, saving and loading, memory estimates, and the whole build."""

import dataclasses
import json

import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.retrieval.build import build_index, duration, exact_search, recall
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import dense_retriever
from cipo_jax.retrieval.embedding import SparseProjection
from cipo_jax.retrieval.encoder import BertEmbedder
from cipo_jax.retrieval.index import IndexSpec, VectorIndex, index_folder
from cipo_jax.retrieval.memory import GIB, index_memory, preflight
from cipo_jax.retrieval.store import EmbeddingStore, digest


def _vectors(rows, dim=32, seed=0):
    # Clustered, as embeddings are: uniform vectors have no near neighbours to find.
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(50, dim))
    vectors = centres[rng.integers(0, 50, rows)] + 0.4 * rng.normal(size=(rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    "factory, at_least", [("Flat", 1.0), ("IVF32,SQ8", 0.95), ("HNSW16", 0.95), ("SQ8", 0.95), ("PCA24,Flat", 0.4)]
)
def test_recall_against_brute_force(factory, at_least, tmp_path):
    vectors, queries = _vectors(3000), _vectors(64, seed=1)
    spec = IndexSpec(factory, nprobe=16, threads=1)
    index = VectorIndex.from_embeddings(vectors, spec)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    scores, rows = index.search(queries, 10)
    assert recall(rows, exact) >= at_least
    assert (np.diff(scores, axis=1) <= 1e-6).all()
    for row in (0, 63):  # whatever stands beside it
        np.testing.assert_array_equal(index.search(queries[row : row + 1], 10)[1][0], rows[row])
    index.save(tmp_path)
    for mmap in (False, True):
        loaded = VectorIndex.load(tmp_path, mmap=mmap)
        assert loaded.spec == spec and len(loaded) == 3000 and loaded.dim == 32
        np.testing.assert_array_equal(loaded.search(queries, 10)[1], rows)


def test_search_parameters_may_change_after_the_build(tmp_path):
    vectors, queries = _vectors(3000), _vectors(64, seed=1)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    VectorIndex.from_embeddings(vectors, IndexSpec("IVF64,Flat", nprobe=1)).save(tmp_path)
    narrow = recall(VectorIndex.load(tmp_path).search(queries, 10)[1], exact)
    wide = recall(VectorIndex.load(tmp_path, IndexSpec("IVF64,Flat", nprobe=64)).search(queries, 10)[1], exact)
    assert narrow < 0.95 < wide == 1.0
    with pytest.raises(UserError, match=r"holds 'IVF64,Flat', not 'Flat'"):
        VectorIndex.load(tmp_path, IndexSpec("Flat"))


def test_missing_or_broken_index_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no index"):
        VectorIndex.load(tmp_path)
    VectorIndex.from_embeddings(_vectors(10)).save(tmp_path)
    (tmp_path / "index.faiss").write_bytes(b"not an index")
    with pytest.raises(UserError, match="cannot be read"):
        VectorIndex.load(tmp_path)


@pytest.mark.parametrize(
    "spec, complaint",
    [(IndexSpec("Nonsense7"), "'Nonsense7' is not one"), (IndexSpec("IVF64,Flat"), "64 lists but only 20 vectors")],
)
def test_impossible_indices_are_user_errors(spec, complaint):
    with pytest.raises(UserError, match=complaint):
        VectorIndex.from_embeddings(_vectors(20), spec)


@pytest.mark.parametrize("factory", ["Flat", "IVF32,SQ8", "HNSW16", "SQ8", "HNSW16_SQ8"])
def test_memory_estimate_is_the_file_size(factory, tmp_path):
    VectorIndex.from_embeddings(_vectors(3000), IndexSpec(factory)).save(tmp_path)
    size = (tmp_path / "index.faiss").stat().st_size
    assert index_memory(factory, 3000, 32).serving == pytest.approx(size, rel=0.1)


def test_wikipedia_sizes():
    """The published ~65 GB of Flat and ~16 GB of IVF4096,SQ8 (decimal) over 21 M x 768."""
    flat, quantised = (index_memory(f, 21_015_324, 768, 262_144) for f in ("Flat", "IVF4096,SQ8"))
    assert flat.serving / 1e9 == pytest.approx(65, rel=0.02)
    assert quantised.serving / 1e9 == pytest.approx(16, rel=0.05)
    assert quantised.training == 262_144 * 768 * 4


def test_preflight_refuses_with_the_numbers():
    assert preflight("x", 3 * GIB, available=4 * GIB) == "x needs 3.00 GiB of memory; 4.00 GiB are available"
    with pytest.raises(UserError, match=r"needs 5\.00 GiB of memory; 4\.00 GiB are available"):
        preflight("x", 5 * GIB, available=4 * GIB)


def test_index_larger_than_memory_is_refused_before_loading(tmp_path, monkeypatch):
    VectorIndex.from_embeddings(_vectors(100)).save(tmp_path)
    monkeypatch.setattr("cipo_jax.retrieval.memory.available_bytes", lambda: 5000)
    with pytest.raises(UserError, match="GiB are available; set dense_retriever"):
        VectorIndex.load(tmp_path)
    assert len(VectorIndex.load(tmp_path, mmap=True)) == 100


def test_exact_search_equals_numpy(tmp_path):
    vectors, queries = _vectors(100), _vectors(7, seed=1)
    vectors[60] = vectors[3]  # a tie over two chunks
    store = EmbeddingStore.create(tmp_path, 100, 32, {}, chunk_rows=16)
    for chunk in range(store.chunks):
        store.write(chunk, vectors[slice(*store.bounds(chunk))], digest(b""))
    scores = queries @ vectors.T
    expected = np.lexsort((np.broadcast_to(np.arange(100), scores.shape), -scores), axis=-1)[:, :5]
    np.testing.assert_array_equal(exact_search(store, queries, 5), expected)
    tied = exact_search(store, vectors[3:4], 2)[0]
    assert tied.tolist() == [3, 60]


def test_build_index_end_to_end(embedder, tiny_encoder, tmp_path):
    rng = np.random.default_rng(0)
    records = [{"title": f"w{i % 40}", "text": " ".join(f"w{j}" for j in rng.integers(0, 40, 6))} for i in range(300)]
    corpus, told = ListCorpus(records), []
    specs = (IndexSpec("Flat", threads=1), IndexSpec("IVF4,SQ8", nprobe=4, threads=1))
    numbers = build_index(corpus, embedder, str(tmp_path), specs, chunk_rows=64, recall_queries=32, tell=told.append)
    assert numbers["indices"]["Flat"]["recall_at_10"] == 1.0
    assert numbers["indices"]["IVF4,SQ8"]["recall_at_10"] > 0.9
    assert any("GiB are available" in line for line in told) and any("per second" in line for line in told)
    described = json.loads((index_folder(tmp_path, "IVF4,SQ8") / "index.json").read_text())
    assert described["rows"] == 300 and described["embedding_checksum"] == numbers["embedding_checksum"]
    for spec in specs:
        retriever = dense_retriever(corpus, embedder, str(tmp_path), spec)
        own = [corpus.passage(row).contents for row in range(0, 300, 30)]
        assert [found[0].row for found in retriever.retrieve(own, 3)] == list(range(0, 300, 30))
    other = BertEmbedder(str(tiny_encoder), dataclasses.replace(embedder.spec, pooling="cls"))
    with pytest.raises(UserError, match=r"another pooling \('mean', now 'cls'\)"):
        dense_retriever(corpus, other, str(tmp_path), specs[0])
    with pytest.raises(UserError, match="vectors of 16 numbers but the encoder makes 8"):
        dense_retriever(corpus, SparseProjection(8), str(tmp_path), specs[0])
    again: list[str] = []
    assert build_index(corpus, embedder, str(tmp_path), specs[:1], 64, tell=again.append)["passages"] == 300
    assert not any("embedded" in line for line in again)


def test_build_of_nothing_is_a_user_error(embedder, tmp_path):
    with pytest.raises(UserError, match="no passages"):
        build_index(ListCorpus([]), embedder, str(tmp_path))


def test_duration():
    assert [duration(s) for s in (0.4, 75, 3700)] == ["0m00s", "1m15s", "1h01m"]
