"""Packed corpora are read as the plain ones are."""

import gzip
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import split_contents
from cipo_jax.retrieval.corpus_formats import open_corpus
from cipo_jax.retrieval.retriever import Passage

RECORDS = [{"id": "a", "title": "Zürich", "text": "A city."}, {"id": "b", "title": "", "text": "red\nfox"}]


def _plain(path):
    path.write_text("".join(json.dumps(r) + "\n" for r in RECORDS))


def _gz(path):
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(r) + "\n" for r in RECORDS))


def _parquet(path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet corpora need pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{**r, "other": 3} for r in RECORDS]), path)


@pytest.mark.parametrize("name, write", [("c.jsonl", _plain), ("c.jsonl.gz", _gz), ("c.parquet", _parquet)])
@pytest.mark.parametrize("cached", [False, True])
def test_formats(tmp_path, name, write, cached):
    path = tmp_path / name
    write(path)
    cache = str(tmp_path / "cache") if cached else None
    for _ in range(2):
        corpus = open_corpus(str(path), cache)
        assert [corpus.passage(r) for r in range(len(corpus))] == [
            Passage(0, "a", "Zürich", "A city."), Passage(1, "b", "", "red\nfox")
        ]  # fmt: skip


def test_unpacked_copy_follows_its_source(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    _gz(path)
    open_corpus(str(path))
    copy = tmp_path / "c.unpacked.jsonl"
    before = copy.stat().st_mtime_ns
    open_corpus(str(path))
    assert copy.stat().st_mtime_ns == before
    with gzip.open(path, "wt") as file:
        file.write('{"text": "new"}\n')
    os.utime(path, ns=(1, 1))
    assert open_corpus(str(path)).passage(0).text == "new"


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.parquet"])
def test_broken_packed_files_are_user_errors(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="parquet corpora need pyarrow")
    path = tmp_path / name
    path.write_bytes(b"neither gzip nor parquet")
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        open_corpus(str(path))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_truncated_gzip_is_a_user_error(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    _gz(path)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="cannot be unpacked"):
        open_corpus(str(path))
    with pytest.raises(UserError, match="is not a file"):
        open_corpus(str(tmp_path / "none.jsonl"))


@settings(deadline=None, max_examples=200)
@given(st.text(min_size=1).filter(lambda t: "\n" not in t and t.strip()), st.text())
def test_contents_are_read_back(title, text):
    assert split_contents(Passage(0, "0", title, text).contents) == (title, text)
