"""The embedding store and its driver: resuming, checksums, refusals."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.embed_corpus import embed_corpus
from cipo_jax.retrieval.encoder import BertEmbedder, EncoderSpec
from cipo_jax.retrieval.store import EmbeddingStore, digest


def _records(count=50, seed=0):
    rng = np.random.default_rng(seed)
    return [{"text": " ".join(f"w{i}" for i in rng.integers(0, 40, rng.integers(1, 20)))} for _ in range(count)]


@pytest.fixture(scope="module")
def whole(embedder, tmp_path_factory):
    """An unbroken build of 50 passages in chunks of 8."""
    return embed_corpus(ListCorpus(_records()), embedder, str(tmp_path_factory.mktemp("whole")), chunk_rows=8)


def _array_files(store):
    return {p.name: p.read_bytes() for p in (store.folder / "embeddings").iterdir()}


def test_rows_are_the_passages_embeddings(whole, embedder):
    corpus = ListCorpus(_records())
    texts = [corpus.passage(r).contents for r in range(50)]
    np.testing.assert_allclose(whole.read(0, 50), embedder.embed_passages(texts), atol=2e-6)
    rows = np.array([49, 3, 3, 17])
    np.testing.assert_array_equal(whole.read_rows(rows), whole.read(0, 50)[rows])
    blocks = list(whole.blocks())
    assert [first for first, _ in blocks] == list(range(0, 50, 8))
    np.testing.assert_array_equal(np.concatenate([b for _, b in blocks]), whole.read(0, 99))


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("after", range(7))
def test_build_stopped_after_any_chunk_resumes_to_the_same_bytes(whole, embedder, tmp_path, after):
    corpus, calls = ListCorpus(_records()), []

    def progress(done, total, _):
        calls.append((done, total))
        if len(calls) == after + 1:
            raise _Killed

    with pytest.raises(_Killed):
        embed_corpus(corpus, embedder, str(tmp_path), chunk_rows=8, progress=progress)
    first = len(calls)
    store = embed_corpus(corpus, embedder, str(tmp_path), chunk_rows=8, progress=lambda *a: calls.append(a[:2]))
    assert _array_files(store) == _array_files(whole)
    assert store.checksum() == whole.checksum()
    assert len(calls) == 7 and calls[-1] == ((50, 50) if first < 7 else calls[-1])


def test_damage_is_found_and_mended(whole, embedder, tmp_path):
    corpus = ListCorpus(_records())
    store = embed_corpus(corpus, embedder, str(tmp_path), chunk_rows=8)
    good = _array_files(store)
    chunks = sorted(p for p in (tmp_path / "embeddings").iterdir() if not p.name.startswith("."))
    flipped = bytearray(chunks[1].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    chunks[1].write_bytes(flipped)
    chunks[2].write_bytes(chunks[2].read_bytes()[:40])
    chunks[3].unlink()
    done = tmp_path / "done-0.jsonl"
    lines = done.read_bytes().rstrip().split(b"\n")
    done.write_bytes(b"\n".join(lines[:-1]) + b"\n" + lines[-1][:25])  # the last line is torn
    redone = []
    store = embed_corpus(corpus, embedder, str(tmp_path), chunk_rows=8, progress=lambda *a: redone.append(a[0]))
    assert len(redone) == 4
    assert _array_files(store) == good == _array_files(whole)
    assert store.checksum() == whole.checksum()


def test_changed_passages_are_encoded_again(embedder, tmp_path):
    records = _records()
    embed_corpus(ListCorpus(records), embedder, str(tmp_path), chunk_rows=8)
    records[20] = {"text": "w1 w2"}
    redone = []
    store = embed_corpus(
        ListCorpus(records), embedder, str(tmp_path), chunk_rows=8, progress=lambda *a: redone.append(a[0])
    )
    assert len(redone) == 1
    np.testing.assert_allclose(store.read(20, 21), embedder.embed_passages(["w1 w2"]), atol=2e-6)


def test_another_encoder_or_size_is_refused(embedder, tiny_encoder, tmp_path):
    embed_corpus(ListCorpus(_records()), embedder, str(tmp_path), chunk_rows=8)
    other = BertEmbedder(str(tiny_encoder), EncoderSpec(max_tokens=20), max_devices=1)
    with pytest.raises(UserError, match="another fingerprint"):
        embed_corpus(ListCorpus(_records()), other, str(tmp_path), chunk_rows=8)
    with pytest.raises(UserError, match="another rows"):
        embed_corpus(ListCorpus(_records(51)), embedder, str(tmp_path), chunk_rows=8)


def test_unfinished_store_has_no_checksum(tmp_path):
    store = EmbeddingStore.create(tmp_path, 10, 4, {}, chunk_rows=4)
    store.write(0, np.ones((4, 4)), digest(b"x"))
    with pytest.raises(UserError, match="lacks 2 of 3 chunks"):
        store.checksum()
    with pytest.raises(ValueError, match="needs shape"):
        store.write(2, np.ones((4, 4)), digest(b"x"))
    with pytest.raises(UserError, match="not an embedding store"):
        EmbeddingStore.open(tmp_path / "none")


def test_float16_store(embedder, tmp_path):
    store = embed_corpus(ListCorpus(_records()), embedder, str(tmp_path), chunk_rows=8, dtype="float16")
    assert store.dtype == np.float16 and store.read(0, 2).dtype == np.float32
    assert all(store.intact(c, e) for c, e in store.declared().items())


_PROGRAM = """
import sys, json, jax
from cipo_jax.retrieval.corpus import FileCorpus
from cipo_jax.retrieval.embed_corpus import embed_corpus
from cipo_jax.retrieval.encoder import BertEmbedder, EncoderSpec
embedder = BertEmbedder(sys.argv[1], EncoderSpec(max_tokens=24), batch=4, bucket=4)
embed_corpus(FileCorpus(sys.argv[2]), embedder, sys.argv[3], chunk_rows=8,
             progress=lambda done, *_: print(done, flush=True))
"""


def test_sigkill_at_random_moments(tiny_encoder, tmp_path):
    """Real kills of a real process; the acceptance run with MiniLM is benchmarks/retrieval_kill.py."""
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in _records(600, seed=3)))
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(folder):
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(tiny_encoder), str(path), str(folder)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    unbroken = start(tmp_path / "unbroken")
    rng = np.random.default_rng(0)
    killed = start(tmp_path / "killed")
    killed.stdout.readline()  # one chunk is done
    time.sleep(rng.uniform(0, 0.1))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = len(EmbeddingStore.open(tmp_path / "killed").declared())
    assert 0 < done < 75
    resumed = start(tmp_path / "killed")
    assert resumed.communicate()[0] and resumed.returncode == 0
    assert unbroken.communicate()[0] and unbroken.returncode == 0
    a, b = EmbeddingStore.open(tmp_path / "killed"), EmbeddingStore.open(tmp_path / "unbroken")
    assert a.checksum() == b.checksum() and _array_files(a) == _array_files(b)
