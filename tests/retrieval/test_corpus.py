"""Corpus files: formats, random access, broken lines."""

import json

import pytest

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import FileCorpus, ListCorpus, split_contents
from cipo_jax.retrieval.retriever import Passage


@pytest.mark.parametrize(
    "contents, title, text",
    [
        ('"Evan Morris"\nEvan was a lobbyist.', "Evan Morris", "Evan was a lobbyist."),
        ('"""Uncle Tom\'s"" Cabin"\na\nb', '"Uncle Tom\'s" Cabin', "a\nb"),
        ("Plain\ntext", "Plain", "text"),
        ("no line break", "", "no line break"),
        ("\nempty title", "", "empty title"),
        ('"\nlone quote', '"', "lone quote"),
    ],
)
def test_split_contents(contents, title, text):
    assert split_contents(contents) == (title, text)


def _write(path, lines):
    path.write_bytes("\n".join(lines).encode())
    return path


def test_rows_are_read_in_any_order(tmp_path):
    lines = [
        '{"id": "a", "contents": "\\"Zürich\\"\\nA city."}',
        "",
        '{"id": 7, "title": "Fox", "text": "red"}',
        '  {"text": "no id, no title"}  ',
    ]
    corpus = FileCorpus(_write(tmp_path / "c.jsonl", lines))
    assert len(corpus) == 3
    assert corpus.passage(2) == Passage(2, "2", "", "no id, no title")
    assert corpus.passage(0) == Passage(0, "a", "Zürich", "A city.")
    assert corpus.passage(1) == Passage(1, "7", "Fox", "red")
    assert [p.row for p in corpus.rows(1, 99)] == [1, 2]
    for row in (-1, 3):
        with pytest.raises(IndexError):
            corpus.passage(row)
    in_memory = ListCorpus(json.loads(line) for line in lines if line)
    assert [in_memory.passage(r) for r in range(3)] == [corpus.passage(r) for r in range(3)]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"id": "b", "contents": ', "Expecting value"),
        ('{"id": "b"}', "'contents' or 'text'"),
        ('{"id": "b", "contents": 3}', "'contents' or 'text'"),
        ('{"id": ["b"], "contents": "x"}', "'id'"),
        ('{"id": "b", "text": "x", "title": 5}', "'title'"),
        ("[1]", "JSON object"),
        ("{}", "missing"),
        ('{"id": "a", "text": "again"}', "line 1"),
    ],
)
def test_broken_lines_name_file_and_line(tmp_path, line, complaint):
    path = _write(tmp_path / "c.jsonl", ['{"id": "a", "text": "x"}', "", line, '{"id": "z", "text": "x"}'])
    with pytest.raises(UserError) as error:
        FileCorpus(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert complaint in str(error.value)


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "a", "text": "\xff\xfe\xfa"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl:1: "):
        FileCorpus(path)


def test_offset_table_is_reused_and_renewed(tmp_path):
    path = _write(tmp_path / "c.jsonl", ['{"id": "a", "text": "x"}'])
    FileCorpus(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]  # nothing is written unless asked
    table = tmp_path / "cache" / "c.jsonl.offsets.npy"
    FileCorpus(path, table.parent)
    before = table.stat().st_mtime_ns
    FileCorpus(path, table.parent)
    assert table.stat().st_mtime_ns == before
    _write(path, ['{"id": "a", "text": "x"}', '{"id": "b", "text": "yy"}'])
    assert FileCorpus(path, table.parent).passage(1).text == "yy"
    table.write_bytes(b"garbage")
    assert len(FileCorpus(path, table.parent)) == 2


def test_offset_table_that_cannot_be_written_is_kept_in_memory(tmp_path):
    path = _write(tmp_path / "c.jsonl", ['{"id": "a", "text": "x"}'])
    (tmp_path / "occupied").write_text("a file where the folder should be")
    assert FileCorpus(path, tmp_path / "occupied").passage(0).text == "x"


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="not a file"):
        FileCorpus(tmp_path / "none.jsonl")
    assert len(FileCorpus(_write(tmp_path / "empty.jsonl", [""]))) == 0


def test_bad_record_in_a_list_names_its_row():
    with pytest.raises(UserError, match="passage 1 "):
        ListCorpus([{"text": "x"}, {"txt": "y"}])
