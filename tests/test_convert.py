"""`python -m cipo_jax.convert`: folders, GGUF files and run checkpoints become Hugging Face folders."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import random_checkpoints as checkpoints
from safetensors.numpy import load_file

from cipo_jax.convert import convert
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.hf_config import decoder_config
from cipo_jax.models.weights import load_decoder
from cipo_jax.training.checkpoints import Checkpoints

# Sizes that divide over eight devices.
HF = checkpoints.CONFIGS["qwen3_v5"] | {"vocab_size": 64}


def test_from_the_command_line(tmp_path):
    source = checkpoints.write(tmp_path / "in", HF)
    bindings = {"source": str(source), "target": str(tmp_path / "out"), "dtype": "bfloat16", "shard_bytes": 30000}
    command = [sys.executable, "-m", "cipo_jax.convert"]
    command += [f"--gin_binding=convert.{key} = {value!r}" for key, value in bindings.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "qwen3" in done.stdout
    assert "model.layers.0.self_attn.q_norm.weight" in done.stdout
    assert "float32" in done.stdout and "bfloat16" in done.stdout
    written = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    values = checkpoints.random_tensors(HF)
    assert written.keys() == values.keys()
    assert all(np.array_equal(written[k], v.astype(written[k].dtype)) for k, v in values.items())


def test_a_runs_parameters_take_the_place_of_the_sources(tmp_path):
    source = checkpoints.write(tmp_path / "in", HF)
    loaded = load_decoder(source, ShardingRules(mesh()))
    trained = jax.tree.map(lambda x: 2 * x, loaded.params)
    with Checkpoints(tmp_path / "checkpoints") as saved:
        saved.save(3, {"params": trained, "opt_state": {"count": np.int32(1)}}, {})
    values = checkpoints.random_tensors(HF)
    for out, given in (("a", {"source": str(source)}), ("b", {"decoder": decoder_config(HF)})):
        convert(target=str(tmp_path / out), checkpoint=str(tmp_path / "checkpoints"), **given)
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == values.keys()
        assert all(np.array_equal(written[name], 2 * value) for name, value in values.items())


def test_nothing_to_read_and_a_target_that_is_the_source_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"convert\.source"):
        convert(target=str(tmp_path / "out"))
    source = checkpoints.write(tmp_path / "in", HF)
    with pytest.raises(UserError, match="folder that the weights come from"):
        convert(source=str(source), target=str(source))
