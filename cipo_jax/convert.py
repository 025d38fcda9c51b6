"""Converts a checkpoint to a Hugging Face folder that transformers and vLLM open, and prints what it wrote.

    python -m cipo_jax.convert --gin_binding='convert.source = "qwen2.5-3b/"' --gin_binding='convert.target = "out/"'

The source is a Hugging Face folder, a .safetensors file beside its config.json, or a .gguf file. With
`convert.checkpoint`, the parameters that a training run saved are written instead: under the names, dtypes, tokenizer and
chat template of the source that the run started from, or, without a source, as the decoder of `convert.decoder`.
"""

from pathlib import Path

import gin
import jax
from rich.console import Console
from rich.table import Table

from cipo_jax import cli
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.models.export import SHARD_BYTES, export_decoder
from cipo_jax.models.hf_config import model_type
from cipo_jax.models.safetensors_files import SafetensorsCheckpoint
from cipo_jax.models.weights import load_decoder, open_checkpoint
from cipo_jax.training.checkpoints import Checkpoints, abstract_like


@gin.configurable
def convert(
    source: str | None = None,
    target: str = gin.REQUIRED,
    checkpoint: str | None = None,
    step: int | None = None,
    decoder: DecoderConfig | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    rows: int = 40,
) -> dict[str, str]:
    """Writes `source` (or `checkpoint` in the layout of `source`) to the folder `target`.

    Args:
      source: where the weights, or the layout and tokenizer, come from.
      target: the folder to write; made if absent.
      checkpoint: a run's folder of checkpoints, whose parameters are written; None converts `source`.
      step: of the checkpoint; None for the best on validation, or the newest where none was scored.
      decoder: the shape of `checkpoint` where there is no `source`.
      dtype: "bfloat16", "float16" or "float32"; the source's, tensor by tensor, if None (float32 for quantised ones).
      shard_bytes: largest size of a weight file.
      rows: tensors to list; 0 lists all.

    Returns:
      tensor name -> file name.
    """
    rules = ShardingRules(mesh())
    opened = None
    if source is not None:
        opened = open_checkpoint(source)
        loaded = load_decoder(opened, rules, param_dtype=_lossless(opened))
        decoder, params = loaded.config, loaded.params
    elif checkpoint is None or decoder is None:
        raise UserError("convert has nothing to read; set convert.source, or convert.checkpoint and convert.decoder.")
    else:
        _, shapes = abstract_decoder(decoder)
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, parameter_shardings(shapes, rules)
        )
    if checkpoint is not None:
        with Checkpoints(checkpoint, read_only=True) as saved:
            step = saved.selected_step if step is None else step
            params = saved.restore({"params": abstract_like(params)}, step)[0]["params"]
    files = export_decoder(target, decoder, params, opened, dtype, shard_bytes=shard_bytes)
    _show(opened, decoder, Path(target), files, rows)
    return files


def _lossless(opened) -> str:
    """A dtype for parameters that rounds nothing in the file: its only one, or float32."""
    fixed = ("A_log", "dt_bias", "linear_attn.norm.weight")  # always kept in float32
    dtypes = {opened.dtype(name) for name in opened.stored if not name.endswith(fixed)}
    return str(dtypes.pop()) if len(dtypes) == 1 else "float32"


def _show(opened, config, target: Path, files: dict[str, str], rows: int) -> None:
    written, console = SafetensorsCheckpoint(target), Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log file has no edge to wrap at
    origin = opened.folder if opened else "a checkpoint"
    table = Table(title=f"{origin} ({model_type(config)}) to {target}")
    for column in ("tensor", "from", "to", "shape", "file"):
        table.add_column(column, overflow="fold")
    names = list(written.stored)
    shown = names if not rows or len(names) <= rows else [*names[: rows - 10], None, *names[-9:]]
    for name in shown:
        if name is None:
            table.add_row("...", "", "", f"{len(names) - rows + 1} more", "")
            continue
        before = str(opened.dtype(name)) if opened and name in opened.stored else "-"
        stored = written.stored[name]
        shape = " x ".join(map(str, written.shape(name)))
        table.add_row(stored, before, str(written.dtype(name)), shape, files[stored])
    console.print(table)
    size = sum((target / file).stat().st_size for file in set(files.values()))
    console.print(f"{len(files)} tensors, {size / 1e9:.3f} GB in {len(set(files.values()))} file(s)")


def main() -> None:
    convert()


if __name__ == "__main__":
    cli.run(main)
