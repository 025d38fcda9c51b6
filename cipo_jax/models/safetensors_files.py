"""Safetensors checkpoints: memory-mapped in, streamed out.

The format is a length, a JSON header and raw bytes. Reading maps the file, so a tensor's pages belong to the page cache
rather than to this process; writing knows every shape beforehand, so one tensor at a time is enough.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.models.hf_config import read_json

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
# What a text decoder does not use: image towers, speculative heads, and buffers that are recomputed.
SKIPPED = re.compile(r"(^|\.)(visual|vision_tower|mtp)\.|rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def canonical(name: str) -> str:
    """A tensor's name without a multimodal prefix."""
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors of a file (dtype, shape, data_offsets by name) and where their data begins.

    Raises:
      UserError: the file is absent, cut short or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"it has {size} of {8 + length + end} bytes")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist, though the index names it; fetch it.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no complete safetensors file ({error}); fetch it again.") from error
    return header, 8 + length


class SafetensorsCheckpoint:
    """The tensors of a folder (single file, or shards with an index) or of one file, by canonical name.

    Attributes:
      folder: the folder.
      hf: its parsed `config.json`.
      stored: canonical name -> the name in the file, for tensors that a text decoder may use.
      skipped: names in the file of image, speculative and buffer tensors.
    """

    def __init__(self, path: str | Path):
        """Opens a checkpoint.

        Raises:
          UserError: nothing to open, a broken file, a tensor in two files or under two prefixes.
        """
        path = Path(path)
        self.folder = path if path.is_dir() else path.parent
        self.hf = read_json(self.folder / "config.json")
        self._entries: dict[str, tuple[Path, dict[str, Any], int]] = {}
        for file in [path] if path.is_file() else self._files():
            header, offset = read_header(file)
            for name, entry in header.items():
                if name in self._entries:
                    raise UserError(f"{name} is in {self._entries[name][0].name} and in {file.name}; keep one of them.")
                self._entries[name] = (file, entry, offset)
        self.stored: dict[str, str] = {}
        self.skipped = [name for name in self._entries if SKIPPED.search(name)]
        for name in self._entries:
            if SKIPPED.search(name):
                continue
            plain = canonical(name)
            if plain in self.stored:
                raise UserError(f"{self.stored[plain]} and {name} are both {plain}; keep one of them.")
            self.stored[plain] = name

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.exists():
            names = read_json(index).get("weight_map") or {}
            files = [self.folder / name for name in dict.fromkeys(names.values())]
            held = {name: file for file in files for name in read_header(file)[0]}
            for name, file in names.items():
                if name not in held:
                    raise UserError(f"{name} is missing from {file}, where {INDEX} places it; fetch that file again.")
            return files
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.folder} holds no .safetensors file; name a Hugging Face model folder.")
        if len(files) > 1 and not (self.folder / "model.safetensors").exists():
            raise UserError(f"{self.folder} holds {len(files)} .safetensors files but no {INDEX}; fetch it.")
        return [self.folder / "model.safetensors"] if len(files) > 1 else files

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor with canonical name `name`."""
        return tuple(self._entries[self.stored[name]][1]["shape"])

    def dtype(self, name: str) -> np.dtype:
        """The stored dtype; an integer or 8-bit one means quantised weights and is refused."""
        code = self._entries[self.stored[name]][1]["dtype"]
        if code not in DTYPES:
            raise UserError(f"{name} is stored as {code}, a quantised type; use the bf16 checkpoint.")
        return DTYPES[code]

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only map of the file."""
        return self.raw(self.stored[name]).view(self.dtype(name)).reshape(self.shape(name))

    def raw(self, stored: str) -> np.ndarray:
        """The bytes of a tensor by its name in the file."""
        file, entry, offset = self._entries[stored]
        begin, end = entry["data_offsets"]
        if begin == end:
            return np.empty(0, np.uint8)
        return np.memmap(file, np.uint8, "r", offset + begin, (end - begin,))

    def entry(self, stored: str) -> tuple[str, tuple[int, ...]]:
        """Dtype code and shape of a tensor by its name in the file."""
        entry = self._entries[stored][1]
        return entry["dtype"], tuple(entry["shape"])


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _size(code: str, shape: tuple[int, ...]) -> int:
    return _BYTES.get(code, 1) * math.prod(shape)


def plan_shards(entries: Mapping[str, tuple[str, tuple[int, ...]]], limit: int) -> list[list[str]]:
    """Names in order, cut into shards of at most `limit` bytes (a larger tensor has a shard of its own)."""
    shards, room = [[]], limit
    for name, (code, shape) in entries.items():
        size = _size(code, shape)
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def write_checkpoint(
    folder: Path,
    entries: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray | None]],
    limit: int,
    write: bool = True,
) -> dict[str, str]:
    """Writes a safetensors checkpoint, one tensor at a time.

    A file appears under its name only when it is complete.

    Args:
      folder: where to.
      entries: name -> (dtype code, shape), in the order in which `arrays` yields.
      arrays: (name, contiguous array) pairs.
      limit: largest size of a file in bytes.
      write: False walks through `arrays` without writing (processes that only take part in gathering).

    Returns:
      name -> file name.
    """
    shards = plan_shards(entries, limit)
    arrays, placed = iter(arrays), {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        placed |= dict.fromkeys(names, file)
        if not write:
            for _ in names:
                next(arrays)
            continue
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            code, shape = entries[name]
            size = _size(code, shape)
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        partial = folder / f".{file}.partial"
        with open(partial, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                got, array = next(arrays)
                code, shape = entries[name]
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                if got != name or data.size != _size(code, shape):
                    raise AssertionError(f"{got} arrived where {name} {code} {shape} was announced")
                out.write(data)
        os.replace(partial, folder / file)
    if len(shards) > 1 and write:
        total = sum(_size(*entry) for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return placed
