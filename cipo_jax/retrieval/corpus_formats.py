"""Corpus files in other formats, unpacked once into the JSON lines that `FileCorpus` maps."""

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import FileCorpus
from cipo_jax.retrieval.store import write_atomically


@gin.configurable
def open_corpus(path: str = gin.REQUIRED, cache_dir: str | None = None) -> FileCorpus:
    """Opens a corpus file: `.jsonl` as it is; `.jsonl.gz` and `.parquet` through an unpacked copy.

    Args:
      path: the corpus.
      cache_dir: for the unpacked copy (default: beside the corpus) and the offset table (default: not kept).
    """
    source = Path(path)
    if not source.is_file():
        raise UserError(f"corpus {path!r} is not a file; give a .jsonl, .jsonl.gz or .parquet file of passages")
    if source.suffix in (".gz", ".parquet"):
        source = unpack(source, Path(cache_dir) if cache_dir else source.parent)
    return FileCorpus(source, cache_dir)


def unpack(source: Path, folder: Path) -> Path:
    """Writes `source` as JSON lines into `folder`, unless the copy there is of this very file; returns the copy."""
    copy = folder / (source.name.removesuffix(source.suffix).removesuffix(".jsonl") + ".unpacked.jsonl")
    stamp_file = copy.with_name(copy.name + ".stamp")
    stat = source.stat()
    stamp = f"{source.name} {stat.st_size} {stat.st_mtime_ns}"
    if copy.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
        return copy
    folder.mkdir(parents=True, exist_ok=True)
    temporary = copy.with_name(f"{copy.name}.{os.getpid()}.tmp")
    try:
        if source.suffix == ".gz":
            with gzip.open(source, "rb") as packed, open(temporary, "wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        else:
            with open(temporary, "w", encoding="utf-8") as plain:
                for record in _parquet_records(source):
                    plain.write(json.dumps(record, ensure_ascii=False) + "\n")
        os.replace(temporary, copy)
    except (OSError, EOFError) as error:
        raise UserError(
            f"corpus {str(source)!r} cannot be unpacked into {folder} ({error}); mend it or set cache_dir"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    write_atomically(stamp_file, stamp)
    return copy


def _parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"corpus {str(path)!r} is parquet, which needs pyarrow; pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [n for n in ("id", "_id", "title", "text", "contents") if n in file.schema_arrow.names]
            for batch in file.iter_batches(columns=names):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"corpus {str(path)!r} is not a readable parquet file ({error}); mend it") from None
