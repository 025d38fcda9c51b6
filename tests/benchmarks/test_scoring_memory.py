"""Scoring a long row forms neither a `[L, L]` nor a `[L, V]` array."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest

from cipo_jax.benchmarks.scoring_memory import compiled_scoring, quadratic, shapes_in
from cipo_jax.models.config import DecoderConfig

SMALL = DecoderConfig(vocab_size=1031, width=16, depth=1, heads=2, kv_heads=1, head_dim=8, ffn=24)


def test_quadratic_arrays_are_found_however_they_are_shaped():
    shapes = [(1, 64, 64), (64, 99), (99, 64), (64 * 64,), (70, 2, 80), (2, 64 * 99), (99, 16), (64, 16), (99,)]
    assert quadratic(shapes, 64, 99) == sorted(shapes[:6])
    assert shapes_in("f32[2,3]{1,0} add(bf16[2,3]{1,0} x, pred[] y, s32[7] z)") == {(2, 3): 2, (7,): 1}


def test_no_quadratic_array_on_this_machine():
    compiled = compiled_scoring(SMALL, jax.devices()[0], 3072, 512)
    shapes = shapes_in(compiled.as_text())
    assert any(3584 in shape for shape in shapes)  # the text shows shapes
    assert not quadratic(shapes, 3072, 1031)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 3072**2


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_real_shape_on_one_v5e_chip():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "cipo_jax.benchmarks.scoring_memory"]
    found = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    assert found["quadratic_arrays"] == []
    assert found["temporary_bytes"] < found["one_float32_L_V_bytes"] / 2
    assert found["temporary_bytes"] + found["arguments_bytes"] < found["hbm_bytes"]
