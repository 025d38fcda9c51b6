"""Embeddings on disk: a chunked tensorstore array with a checksum per chunk, resumable after a kill at any instant."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from cipo_jax.errors import UserError

_HEADER = "store.json"


def digest(data: bytes | memoryview) -> str:
    """The checksum used for texts and embeddings: 128-bit BLAKE2b, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is either whole or absent, whatever happens meanwhile."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class EmbeddingStore:
    """`[rows, dim]` embeddings in chunks of whole rows.

    A chunk is written and synced before the line that declares it done, so a kill leaves at worst a chunk that is not
    declared, which the next build writes again. Each process of a multi-host build declares its chunks in its own
    file.

    Folder: `store.json` (sizes and fingerprint), `embeddings/` (zarr), `done-<process>.jsonl`.

    Attributes:
      rows: number of embeddings.
      dim: their size.
      chunk_rows: rows per chunk.
      fingerprint: what the embeddings were made with.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any], process: int = 0):
        self.folder = Path(folder)
        self.rows, self.dim, self.chunk_rows = header["rows"], header["dim"], header["chunk_rows"]
        self.dtype = np.dtype(header["dtype"])
        self.fingerprint = header["fingerprint"]
        self._process = process
        self._array = ts.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.folder / "embeddings")}},
            open=True,
            create=True,
            dtype=self.dtype.name,
            shape=[self.rows, self.dim],
            chunk_layout=ts.ChunkLayout(chunk_shape=[self.chunk_rows, self.dim]),
        ).result()

    @classmethod
    def create(
        cls,
        folder: str | Path,
        rows: int,
        dim: int,
        fingerprint: Mapping[str, Any],
        chunk_rows: int = 4096,
        dtype: str = "float32",
        process: int = 0,
    ) -> "EmbeddingStore":
        """Makes a store, or reopens one of the same sizes and fingerprint; `UserError` when they differ."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        header = {
            "rows": rows, "dim": dim, "chunk_rows": min(chunk_rows, rows), "dtype": dtype,
            "fingerprint": dict(fingerprint),
        }  # fmt: skip
        if (folder / _HEADER).exists():
            found = _read_header(folder)
            different = [k for k in header if found.get(k) != header[k]]
            if different:
                raise UserError(
                    f"{folder} holds embeddings with another {different[0]} ({found.get(different[0])!r}, now "
                    f"{header[different[0]]!r}); delete the folder or choose a new one"
                )
        else:
            write_atomically(folder / _HEADER, json.dumps(header, indent=1))
        return cls(folder, header, process)

    @classmethod
    def open(cls, folder: str | Path) -> "EmbeddingStore":
        """Opens a store for reading; `UserError` when there is none."""
        return cls(Path(folder), _read_header(Path(folder)))

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Returns the rows `[start, stop)` of a chunk."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows)

    def declared(self) -> dict[int, dict[str, Any]]:
        """Returns `{chunk: {"texts": checksum, "embeddings": checksum}}` of the chunks declared done."""
        entries: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("done-*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                    entries[entry["chunk"]] = entry
                except (ValueError, KeyError, TypeError):
                    continue  # a line torn by a kill
        return entries

    def write(self, chunk: int, embeddings: np.ndarray, texts_digest: str) -> None:
        """Writes one chunk durably, then declares it done."""
        start, stop = self.bounds(chunk)
        data = np.ascontiguousarray(embeddings, self.dtype)
        if data.shape != (stop - start, self.dim):
            raise ValueError(f"chunk {chunk} needs shape {(stop - start, self.dim)}, got {data.shape}")
        self._array[start:stop].write(data).result()
        line = json.dumps({"chunk": chunk, "texts": texts_digest, "embeddings": digest(data.data)})
        with open(self.folder / f"done-{self._process}.jsonl", "ab") as file:
            # The leading line break parts this line from one that a kill tore.
            file.write(f"\n{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns rows `[start, stop)` as `[n, dim]` float32."""
        return np.asarray(self._array[start : min(stop, self.rows)].read().result(), np.float32)

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the given rows as `[n, dim]` float32; reads every chunk that holds one of them once."""
        out = np.empty((len(rows), self.dim), np.float32)
        chunk_of = np.asarray(rows) // self.chunk_rows
        for chunk in np.unique(chunk_of):
            start, stop = self.bounds(int(chunk))
            members = np.flatnonzero(chunk_of == chunk)
            out[members] = self.read(start, stop)[np.asarray(rows)[members] - start]
        return out

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields `(first row, [n, dim] float32)` of every chunk in order."""
        for chunk in range(self.chunks):
            start, stop = self.bounds(chunk)
            yield start, self.read(start, stop)

    def intact(self, chunk: int, entry: Mapping[str, Any]) -> bool:
        """Whether a chunk's bytes have the checksum they were declared with."""
        start, stop = self.bounds(chunk)
        try:
            data = np.ascontiguousarray(self._array[start:stop].read().result())
        except ValueError:  # a chunk file that cannot be decoded
            return False
        return digest(data.data) == entry["embeddings"]

    def checksum(self) -> str:
        """One checksum over all declared chunks' checksums, in order; equal for equal embeddings."""
        entries = self.declared()
        missing = [c for c in range(self.chunks) if c not in entries]
        if missing:
            raise UserError(f"{self.folder} lacks {len(missing)} of {self.chunks} chunks; run build_index again")
        return digest("".join(entries[c]["embeddings"] for c in range(self.chunks)).encode())


def _read_header(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _HEADER).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is not an embedding store ({error}); make one with build_index") from None
