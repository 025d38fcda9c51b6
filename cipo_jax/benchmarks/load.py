"""How much memory and time loading a checkpoint onto simulated devices takes.

    python -m cipo_jax.benchmarks.load --folder=/tmp/qwen [--devices=4] [--preset=configs/models/qwen2_5_1_5b.gin]

Writes a random bf16 checkpoint of the preset's shape into the folder unless it holds one, loads it in a process of its own,
and prints the peak of the anonymous resident memory (what the page cache does not own), sampled every 10 ms.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (RssAnon, Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def write(folder: Path, preset: str, shard_bytes: int = 10**9) -> None:
    """A checkpoint of random bf16 values, in several files, through the project's own writer."""
    import gin
    import ml_dtypes
    import numpy as np

    from cipo_jax.models.config import DecoderConfig
    from cipo_jax.models.hf_config import hf_config
    from cipo_jax.models.names import tensors
    from cipo_jax.models.safetensors_files import write_checkpoint

    gin.parse_config_file(preset)
    config = DecoderConfig()
    gin.clear_config()
    table = list(tensors(config))
    rng = np.random.default_rng(0)

    def arrays():
        for tensor in table:
            bits = rng.integers(0x3C00, 0x3D00, tensor.shape, np.uint16)  # 0.008 to 0.03
            yield tensor.name, bits.view(ml_dtypes.bfloat16)

    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, {t.name: ("BF16", t.shape) for t in table}, arrays(), shard_bytes)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))


def load(folder: Path) -> dict[str, float]:
    """Loads and measures; on the devices that JAX sees."""
    import jax

    from cipo_jax.distributed.mesh import mesh
    from cipo_jax.distributed.sharding import ShardingRules
    from cipo_jax.models.weights import load_decoder

    rules = ShardingRules(mesh())
    jax.block_until_ready(jax.device_put(1.0))
    peak, done, before = 0, threading.Event(), anonymous_bytes()

    def sample():
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    began = time.perf_counter()
    loaded = load_decoder(folder, rules, param_dtype="bfloat16")
    jax.block_until_ready(loaded.params)
    seconds = time.perf_counter() - began
    done.set()
    thread.join()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    held = [0] * len(jax.devices())
    for array in jax.tree.leaves(loaded.params):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return {
        "checkpoint_GB": size / 1e9,
        "devices": len(jax.devices()),
        "largest_device_GB": max(held) / 1e9,
        "start_GB": before / 1e9,
        "peak_GB": peak / 1e9,
        "peak_over_size": peak / size,
        "seconds_per_GB": seconds / (size / 1e9),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--preset", default="configs/models/qwen2_5_1_5b.gin")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps({key: round(value, 3) for key, value in load(args.folder).items()}))
        return
    if not (args.folder / "config.json").exists():
        write(args.folder, args.preset)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}",
    }
    command = [sys.executable, "-m", "cipo_jax.benchmarks.load", f"--folder={args.folder}", "--worker"]
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
