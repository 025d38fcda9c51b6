"""How long the update, the scoring pass and the scanned rollout of a deep model compile, against a shallow one.

    JAX_PLATFORMS=cpu python -m cipo_jax.benchmarks.compile_time [--depths=4,28] [--hybrid]

Prints seconds of tracing and compiling, wall clock and processor time (which other programs on the machine disturb less),
and their ratio. Layers are scanned, so depth should hardly matter.
"""

import argparse
import json
import time

import jax

from cipo_jax.distributed.mesh import mesh
from cipo_jax.models.config import DecoderConfig
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.programs import Programs
from cipo_jax.training.step import Method

HYBRID = dict(
    period=("delta", "delta", "delta", "attention"),
    rotary=0.25,
    gated=True,
    zero_centred=True,
    delta_key_heads=4,
    delta_value_heads=4,
    delta_key_dim=32,
    delta_value_dim=32,
)


def compile_seconds(depth: int, hybrid: bool) -> dict[str, tuple[float, float]]:
    """(wall, processor) seconds of each program at a depth."""
    decoder = DecoderConfig(
        vocab_size=1024, width=128, depth=depth, heads=4, kv_heads=2, head_dim=32, ffn=256, **(HYBRID if hybrid else {})
    )
    rollout = RolloutConfig(prompt_tokens=128, total_tokens=512, action_tokens=64, observation_tokens=64, unroll=False)
    method = Method(questions=4, samples=2, minibatches=1)
    programs = Programs(decoder, rollout, method, mesh(devices=jax.devices()[:1]))
    seconds = {}
    for phase in ("update", "scoring", "rollout"):
        wall, processor = time.perf_counter(), time.process_time()
        getattr(programs, phase)().compile()
        seconds[phase] = time.perf_counter() - wall, time.process_time() - processor
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,28")
    parser.add_argument("--hybrid", action="store_true")
    args = parser.parse_args()
    shallow, deep = (int(depth) for depth in args.depths.split(","))
    compile_seconds(shallow, args.hybrid)  # what is compiled once per process must not count
    low, high = compile_seconds(shallow, args.hybrid), compile_seconds(deep, args.hybrid)
    for phase in low:
        print(
            json.dumps(
                {
                    "program": phase,
                    f"layers_{shallow}": [round(x, 2) for x in low[phase]],
                    f"layers_{deep}": [round(x, 2) for x in high[phase]],
                    "ratio": [round(b / a, 3) for a, b in zip(low[phase], high[phase], strict=True)],
                }
            )
        )


if __name__ == "__main__":
    main()
