"""What scoring one long row keeps in memory, compiled ahead for a chip that need not be here.

    pip install libtpu
    python -m cipo_jax.benchmarks.scoring_memory --memory_json=memory.json

Visible and masked log-probs of a row of 8,192 tokens under Qwen2.5-0.5B's shape, on one v5e chip. The numbers are the
compiler's; arrays with a token on both axes, or tokens by vocabulary, are looked for in the compiled program and listed.
"""

import collections
import functools
import math
import os
import re

import jax
import jax.numpy as jnp
from absl import app, flags

from cipo_jax.benchmarks.report import write_report
from cipo_jax.distributed.compiled import HBM, topology_devices, with_shardings
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.attention import Visibility
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.scoring.packing import CopyStream
from cipo_jax.scoring.score import Scorer

FLAGS = flags.FLAGS
flags.DEFINE_string("memory_json", None, "File for the numbers.")
flags.DEFINE_string("chip_of", "v5e:2x2", "Where the chip is from; the devices of this machine if empty.")
flags.DEFINE_integer("row_tokens", 8192, "Length of the row.")
flags.DEFINE_integer("copied_tokens", 2048, "Places for copied tokens behind it.")

QWEN2_5_0_5B = DecoderConfig(
    vocab_size=151936, width=896, depth=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, qkv_bias=True, qk_norm=False,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip


def compiled_scoring(config: DecoderConfig, device, tokens: int, copied: int) -> jax.stages.Compiled:
    """The program that scores one row of `tokens`, and `copied` counterfactual places, for a device."""
    rules = ShardingRules(mesh(devices=[device]))
    graph, shapes = abstract_decoder(config, rules)
    params = with_shardings(shapes, parameter_shardings(shapes, rules))

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rules.batch if shape else rules.replicated)

    place = functools.partial(array, (1, copied))
    names = ("token", "position", "target", "copy")
    stream = CopyStream(**{name: place() for name in names}, visibility=Visibility(*(place() for _ in range(6))))
    row = array((1, tokens)), array((1,)), array((1, tokens), bool)
    return jax.jit(Scorer(graph).__call__).lower(params, *row, array((), jnp.float32), stream).compile()


def shapes_in(text: str) -> collections.Counter:
    """How often each array shape occurs in a compiled program's text."""
    found = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", text)
    return collections.Counter(tuple(int(n) for n in dims.split(",")) for dims in found)


def quadratic(shapes, tokens: int, vocab: int) -> list[tuple[int, ...]]:
    """The shapes with `tokens` or more on two axes, or on one beside the vocabulary; flattened ones too."""

    def both(shape):
        least, most = sorted((1, *shape))[-2:]
        flat = any(n % tokens == 0 and n // tokens in (tokens, vocab) for n in shape)
        return flat or (least >= min(tokens, vocab) and most >= tokens)

    return sorted(filter(both, shapes))


def main(_) -> None:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    device = (topology_devices(FLAGS.chip_of) if FLAGS.chip_of else jax.devices())[0]
    config, tokens = QWEN2_5_0_5B, FLAGS.row_tokens
    compiled = compiled_scoring(config, device, tokens, FLAGS.copied_tokens)
    memory, shapes = compiled.memory_analysis(), shapes_in(compiled.as_text())
    largest = sorted(shapes, key=math.prod, reverse=True)[:8]
    write_report(
        {
            "device": device.device_kind,
            "hbm_bytes": HBM.get(device.device_kind),
            "tokens": tokens,
            "copied": FLAGS.copied_tokens,
            "arguments_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "one_float32_L_L_bytes": 4 * (tokens + FLAGS.copied_tokens) ** 2,
            "one_float32_L_V_bytes": 4 * tokens * config.vocab_size,
            "quadratic_arrays": quadratic(shapes, tokens, config.vocab_size),
            "largest_arrays": largest,
        },
        FLAGS.memory_json,
    )


if __name__ == "__main__":
    app.run(main)
