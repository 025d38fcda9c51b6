"""Corpora: numbered passages, held in memory or memory-mapped from a JSON-lines file."""

import json
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gin
import numpy as np
from absl import logging

from cipo_jax.errors import UserError
from cipo_jax.retrieval.retriever import Passage


class Corpus(Protocol):
    """Passages by row."""

    def __len__(self) -> int: ...

    def passage(self, row: int) -> Passage:
        """Returns the passage in `row`; raises `IndexError` outside `[0, len)`."""
        ...


def split_contents(contents: str) -> tuple[str, str]:
    """Splits `"Title"\\ntext` into title and text; without a line break everything is text.

    wiki-18 quotes titles as CSV does, so one outer pair of quotes is dropped and doubled quotes become single ones.
    """
    head, newline, tail = contents.partition("\n")
    if not newline:
        return "", contents
    title = head.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1].replace('""', '"')
    return title, tail


def passage_from_record(record: Any, row: int) -> Passage:
    """Reads one corpus record: `contents`, or `text` with an optional `title`; the id defaults to the row.

    Raises `ValueError` whose message says what is wrong with the record.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"a passage must be a JSON object, got {type(record).__name__}")
    identifier = record.get("id", record.get("_id", row))
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise ValueError(f"field 'id' must be a string or an integer, got {identifier!r}")
    text, title = record.get("text"), record.get("title")
    if isinstance(text, str):
        title = "" if title is None else title
    elif isinstance(record.get("contents"), str):
        split_title, text = split_contents(record["contents"])
        title = split_title if title is None else title
    else:
        raise ValueError("field 'contents' or 'text' is missing or not a string")
    if not isinstance(title, str):
        raise ValueError(f"field 'title' must be a string, got {title!r}")
    return Passage(row=row, id=str(identifier), title=title, text=text)


class ListCorpus:
    """A corpus held in memory.

    Args:
      records: passages, or records in any form `passage_from_record` reads. Rows are assigned in order.
    """

    def __init__(self, records: Iterable[Passage | Mapping[str, Any]]):
        self._passages: list[Passage] = []
        for row, record in enumerate(records):
            if isinstance(record, Passage):
                self._passages.append(Passage(row, record.id, record.title, record.text))
            else:
                try:
                    self._passages.append(passage_from_record(record, row))
                except ValueError as error:
                    raise UserError(f"passage {row} of the corpus: {error}") from None

    def __len__(self) -> int:
        return len(self._passages)

    def passage(self, row: int) -> Passage:
        if not 0 <= row < len(self._passages):
            raise IndexError(f"row {row} is outside a corpus of {len(self._passages)} passages")
        return self._passages[row]


@gin.configurable
class FileCorpus:
    """A JSON-lines corpus read by row through a memory map; only the offset table (8 bytes a row) is in memory.

    Every line is checked when the offset table is made. A table kept in a file is made anew when the corpus file's size
    or time stamp changes. Blank lines are skipped and have no row.

    Args:
      path: plain JSON lines; `unpack` in `corpus_formats.py` turns other formats into this one.
      cache_dir: where the offset table is kept; None makes it at every start and writes nothing.

    Raises `UserError` with file and line for a line that is not a passage, and for an id that occurs twice.
    """

    def __init__(self, path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"corpus {str(self.path)!r} is not a file; give a JSON-lines file of passages")
        self._offsets = _load_or_make_offsets(self.path, Path(cache_dir)) if cache_dir else scan_offsets(self.path)
        with open(self.path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.path.stat().st_size else b""

    def __len__(self) -> int:
        return len(self._offsets)

    def passage(self, row: int) -> Passage:
        if not 0 <= row < len(self._offsets):
            raise IndexError(f"row {row} is outside a corpus of {len(self._offsets)} passages")
        start = int(self._offsets[row])
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : end if end >= 0 else len(self._bytes)]
        return passage_from_record(json.loads(line), row)

    def rows(self, start: int, stop: int) -> Iterator[Passage]:
        """Yields the passages in rows `[start, stop)`."""
        return (self.passage(row) for row in range(start, min(stop, len(self))))


def _load_or_make_offsets(path: Path, cache_dir: Path) -> np.ndarray:
    """Returns the int64 byte offset of every passage's line."""
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    cache = cache_dir / f"{path.name}.offsets.npy"
    try:
        cached = np.load(cache, mmap_mode="r")
        if cached.dtype == np.int64 and cached[:2].tolist() == stamp:
            return cached[2:]
    except (OSError, ValueError):
        pass
    offsets = scan_offsets(path)
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.save(file, np.concatenate([np.array(stamp, np.int64), offsets]))
        os.replace(temporary, cache)
    except OSError as error:
        logging.warning("offset table of %s is kept in memory only: %s", path, error)
    return offsets


def scan_offsets(path: Path) -> np.ndarray:
    """Checks every line of a JSON-lines corpus and returns the int64 offsets of its passages."""
    offsets, id_hashes, lines = array("q"), array("q"), array("q")
    position = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    passage = passage_from_record(json.loads(line), len(offsets))
                except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                    raise UserError(f"{path}:{number}: {error}; mend or delete this line") from None
                offsets.append(position)
                id_hashes.append(hash(passage.id))
                lines.append(number)
            position += len(line)
    _refuse_duplicate_ids(path, np.array(id_hashes, np.int64), lines)
    return np.array(offsets, np.int64)


def _refuse_duplicate_ids(path: Path, hashes: np.ndarray, lines: Sequence[int]) -> None:
    # 64-bit hashes: among 21 M different ids a false alarm has probability 1e-5.
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    if equal.size:
        first, second = lines[order[equal[0]]], lines[order[equal[0] + 1]]
        raise UserError(f"{path}:{second}: this id already stands in line {first}; ids must differ")
