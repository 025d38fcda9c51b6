"""Weights out: a Hugging Face folder that transformers and vLLM open, one gathered tensor at a time."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cipo_jax.errors import UserError
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.hf_config import hf_config, read_json
from cipo_jax.models.names import Tensor, tensors
from cipo_jax.models.safetensors_files import CODES, DTYPES, SafetensorsCheckpoint, write_checkpoint
from cipo_jax.models.weights import VOCABULARY, Checkpoint

SHARD_BYTES = 5 * 10**9
# Beside the weights: configuration, tokenizer and chat template, copied as they are.
_SIDE_FILES = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json preprocessor_config.json "
    "video_preprocessor_config.json processor_config.json"
)


def export_decoder(
    folder: str | Path,
    config: DecoderConfig,
    params: nnx.State,
    source: Checkpoint | None = None,
    dtype: str | None = None,
    tokenizer=None,
    generation: dict | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Writes `params` as a Hugging Face folder. Every process must call it; process 0 writes.

    A tensor is gathered, written and dropped before the next one, so no host or device holds the model.

    Args:
      folder: a new or empty folder, or one that an export may overwrite.
      config: the decoder.
      params: its parameters, sharded in any way.
      source: the checkpoint it was loaded from. Its names, prefixes, dtypes, padding rows, image and speculative tensors,
        configuration and tokenizer are kept, so that an unchanged model is written bit for bit as it was read.
      dtype: of the written tensors ("bfloat16"); the source's, else that of `params`, if None.
      tokenizer: a transformers tokenizer to save (with its chat template) where `source` has none.
      generation: `generation_config.json`, where `source` has none (for instance `{"eos_token_id": [1, 2]}`).
      shard_bytes: largest size of a file.

    Returns:
      tensor name -> file name.
    """
    folder, write = Path(folder), jax.process_index() == 0
    if dtype is not None and jnp.dtype(dtype) not in CODES:
        raise UserError(f"dtype={dtype!r} cannot be exported; choose float32, bfloat16 or float16.")
    files = source if isinstance(source, SafetensorsCheckpoint) else None
    if files is not None and folder.resolve() == files.folder.resolve():
        raise UserError(f"{folder} is the folder that the weights come from; export to another one.")
    values = {path: variable for path, variable in nnx.to_flat_state(params)}
    table = {tensor.name: tensor for tensor in tensors(config)}
    stored = dict(files.stored) if files else {name: name for name in table}
    plan = []  # (name in the file, tensor or None for a copied one, dtype code, shape)
    for plain, name in stored.items():
        tensor = table.get("model.embed_tokens.weight" if plain == "lm_head.weight" and config.tied else plain)
        first = values[tensor.parts[0].path]
        kept = files.dtype(plain) if files else first.get_value().dtype
        if dtype is not None and not first.get_metadata().get("fixed_dtype"):
            kept = jnp.dtype(dtype)
        plan.append((name, tensor, CODES[np.dtype(kept)], files.shape(plain) if files else tensor.shape))
    plan += [(name, None, *files.entry(name)) for name in (files.skipped if files else ())]

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor, code, shape in plan:
            if tensor is None:
                yield name, files.raw(name)
                continue
            out = np.empty(shape, DTYPES[code])
            if shape != tensor.shape:  # padding rows behind the vocabulary
                assert tensor.name in VOCABULARY
                out[tensor.shape[0] :] = files.read(tensor.name)[tensor.shape[0] :]
            _fill(out[: tensor.shape[0]], tensor, values)
            yield name, out

    if write:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            old.unlink()
        _side_files(folder, config, plan, files, tokenizer, generation, dtype)
    entries = {name: (code, tuple(shape)) for name, _, code, shape in plan}
    return write_checkpoint(folder, entries, arrays(), shard_bytes, write)


def _fill(out: np.ndarray, tensor: Tensor, values) -> None:
    for part in tensor.parts:
        array = values[part.path].get_value()
        part.view(out)[...] = _gathered(array, part.period)


def _gathered(array: jax.Array, period: int | None) -> np.ndarray:
    """One layer's slice of a parameter on this host."""
    if period is None:
        return np.asarray(_replicated(array))
    return np.asarray(_layer(array, period))


def _everywhere(array: jax.Array):
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _replicated(array):
    return jax.jit(lambda x: x, out_shardings=_everywhere(array))(array)


_LAYER = {}


def _layer(array, period: int):
    key = array.sharding, array.shape, array.dtype
    if key not in _LAYER:  # one program per kind of parameter, not one per layer
        _LAYER[key] = jax.jit(
            lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), out_shardings=_everywhere(array)
        )
    return _LAYER[key](array, period)


def _side_files(folder: Path, config, plan, files, tokenizer, generation, dtype) -> None:
    if files is not None:
        for name in _SIDE_FILES.split():
            if (files.folder / name).exists():
                shutil.copyfile(files.folder / name, folder / name)
        if dtype is not None:
            _set_dtype(folder / "config.json", dtype)
    else:
        common = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}[plan[0][2]]
        extra = {k: v for k, v in (generation or {}).items() if k in ("eos_token_id", "bos_token_id", "pad_token_id")}
        _write_json(folder / "config.json", hf_config(config, dtype=common, **extra))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if generation is not None:
        _write_json(folder / "generation_config.json", generation)


def _set_dtype(path: Path, dtype: str) -> None:
    hf = read_json(path)
    for part in (hf, hf.get("text_config") or {}):
        for field in ("dtype", "torch_dtype"):
            if field in part:
                part[field] = dtype
    _write_json(path, hf)


def _write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
