"""Weights in: a checkpoint's tensors read, cast and placed on their shards, one parameter at a time."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import gin
import jax
import numpy as np
from flax import nnx

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.models.hf_config import decoder_config
from cipo_jax.models.names import Part, Tensor, tensors
from cipo_jax.models.safetensors_files import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Tensors by canonical name (`model.layers.0.mlp.up_proj.weight`), whatever the file's format."""

    folder: Path
    hf: dict[str, Any]
    stored: dict[str, str]
    skipped: list[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def read(self, name: str) -> np.ndarray: ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a Hugging Face folder, a `.safetensors` file beside its `config.json`, or a `.gguf` file.

    Raises:
      UserError: there is none, or it is broken.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"the checkpoint {path} does not exist; name a folder with config.json, or a .gguf file.")
    gguf = path if path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise UserError(f"{path} holds {len(files)} .gguf files; name one of them.")
        gguf = files[0] if files else None
    if gguf is None:
        return SafetensorsCheckpoint(path)
    from cipo_jax.models.gguf_files import GGUFCheckpoint

    return GGUFCheckpoint(gguf)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A decoder and where it came from.

    Attributes:
      config: what was built.
      graph: its graph definition.
      params: its parameters, placed.
      checkpoint: the source, for `export`.
    """

    config: DecoderConfig
    graph: nnx.GraphDef
    params: nnx.State
    checkpoint: Checkpoint


def load_decoder(
    path: str | Path | Checkpoint,
    rules: ShardingRules,
    config: DecoderConfig | None = None,
    ignore: Collection[str] = (),
    progress: Callable[[int], None] = lambda _: None,
    **overrides,
) -> Loaded:
    """Reads a decoder's weights straight into sharded arrays.

    The host never holds more than the shards of one (stacked) parameter besides what is already placed.

    Args:
      path: see `open_checkpoint`; or an open checkpoint.
      rules: decides where each parameter lives.
      config: the decoder to build; that of the checkpoint's `config.json` if None.
      ignore: fields of `config.json` to ignore, see `hf_config.decoder_config`.
      progress: called with the bytes placed so far.
      **overrides: `DecoderConfig` fields to set, for instance `dtype="bfloat16", param_dtype="bfloat16"`.

    Raises:
      UserError: a missing, extra, doubly mapped, wrongly shaped or quantised tensor, or an untied `lm_head`; it is named.
    """
    checkpoint = open_checkpoint(path) if isinstance(path, str | Path) else path
    if config is None:
        config = decoder_config(checkpoint.hf, ignore, **overrides)
    elif overrides:
        config = dataclasses.replace(config, **overrides)
    table = list(tensors(config))
    check_names(checkpoint, config, table)
    graph, shapes = abstract_decoder(config, rules)
    slots = sources(table)
    flat, placed, size = nnx.to_flat_state(shapes), [], 0
    shardings = dict(nnx.to_flat_state(parameter_shardings(shapes, rules)))
    for at, variable in flat:
        array = _place(checkpoint, slots.pop(at), variable.get_value(), shardings[at].get_value())
        size += array.nbytes
        progress(size)
        placed.append((at, variable.replace(array)))
    if slots:
        raise AssertionError(f"the name table maps to parameters that do not exist: {sorted(map(str, slots))}")
    return Loaded(config, graph, nnx.from_flat_state(placed), checkpoint)


@gin.configurable
def checkpoint_decoder(
    path: str = gin.REQUIRED, dtype: str = "float32", param_dtype: str = "float32", remat: bool | str = True
) -> DecoderConfig:
    """The decoder that the checkpoint at `path` describes; the rest is as in `DecoderConfig`."""
    return decoder_config(open_checkpoint(path).hf, dtype=dtype, param_dtype=param_dtype, remat=remat)


def check_decoder(checkpoint: Checkpoint, decoder: DecoderConfig) -> None:
    """Raises `UserError`, naming the setting, where `decoder` is not what the checkpoint describes."""
    chosen = {name: getattr(decoder, name) for name in ("dtype", "param_dtype", "remat")}
    described = decoder_config(checkpoint.hf, **chosen)
    for field in dataclasses.fields(DecoderConfig):
        ours, theirs = getattr(decoder, field.name), getattr(described, field.name)
        if ours != theirs:
            raise UserError(
                f"DecoderConfig.{field.name}={ours}, but {checkpoint.folder} has {theirs}; use Run.decoder = "
                "@checkpoint_decoder() or the preset of that model"
            )


def sources(table: Collection[Tensor]) -> dict[tuple, dict[int | None, tuple[Tensor, Part]]]:
    """For every parameter the tensor and view behind each index of its stacked axis (None if not stacked)."""
    found: dict[tuple, dict] = defaultdict(dict)
    for tensor in table:
        for part in tensor.parts:
            if part.period in found[part.path]:
                raise AssertionError(f"{part.path} of period {part.period} is mapped twice, by {tensor.name}")
            found[part.path][part.period] = tensor, part
    return dict(found)


def check_names(checkpoint: Checkpoint, config: DecoderConfig, table: Collection[Tensor]) -> None:
    """Raises `UserError`, naming the tensor, unless the checkpoint holds exactly the table's tensors in their shapes.

    Two liberties: the embedding and the output projection may have padding rows behind the vocabulary, and a tied
    checkpoint may store `lm_head` too if it equals the embedding.
    """
    wanted = {tensor.name: tensor for tensor in table}
    where = getattr(checkpoint, "folder", "the checkpoint")
    missing = [name for name in wanted if name not in checkpoint.stored]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{where}: the tensor {missing[0]}{more} is missing; config.json asks for it.")
    extra = [name for name in checkpoint.stored if name not in wanted]
    if config.tied and "lm_head.weight" in extra:
        _check_tied(checkpoint)
        extra.remove("lm_head.weight")
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise UserError(f"{where}: the tensor {checkpoint.stored[extra[0]]}{more} has no place in this architecture.")
    for name, tensor in wanted.items():
        shape = checkpoint.shape(name)
        padded = name in VOCABULARY and shape[1:] == tensor.shape[1:] and shape[0] > tensor.shape[0]
        if shape != tensor.shape and not padded:
            raise UserError(f"{where}: {name} has shape {shape}, config.json asks for {tensor.shape}.")
        checkpoint.dtype(name)  # refuses quantised types before anything is read


VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # may have padding rows


def _check_tied(checkpoint: Checkpoint) -> None:
    head, embedding = (checkpoint.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    same = head.shape == embedding.shape and head.dtype == embedding.dtype
    for at in range(0, len(head) if same else 0, 4096):
        same &= np.array_equal(head[at : at + 4096], embedding[at : at + 4096])
    if not same:
        raise UserError(
            "lm_head.weight differs from model.embed_tokens.weight, though config.json ties them; set "
            "tie_word_embeddings to false there to keep both."
        )


def _place(checkpoint: Checkpoint, parts: dict, shape: jax.ShapeDtypeStruct, sharding) -> jax.Array:
    """One parameter, assembled shard by shard on this process's devices."""
    by_shard: dict[tuple, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape.shape).items():
        by_shard[tuple(s.indices(n)[:2] for s, n in zip(index, shape.shape, strict=True))].append(device)
    buffers = {index: np.empty([b - a for a, b in index], shape.dtype) for index in by_shard}
    for period, (tensor, part) in parts.items():
        stored = checkpoint.read(tensor.name)
        if tensor.name in VOCABULARY:
            stored = stored[: tensor.shape[0]]
        value = part.view(stored)
        for index, buffer in buffers.items():
            if period is None:
                buffer[...] = value[tuple(slice(*ends) for ends in index)]
            elif index[0][0] <= period < index[0][1]:
                buffer[period - index[0][0]] = value[tuple(slice(*ends) for ends in index[1:])]
    arrays = []
    while buffers:
        index, buffer = buffers.popitem()
        arrays += [jax.device_put(buffer, device) for device in by_shard[index]]
    return jax.make_array_from_single_device_arrays(shape.shape, sharding, arrays)
