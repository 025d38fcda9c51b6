"""Checkpoints are loaded exactly or refused naming the tensor; an export of an imported one is the same, bit for bit."""

import json

import decoding
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import random_checkpoints as checkpoints
from flax import nnx
from safetensors.numpy import load_file, save_file

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.decoder import cast, init_decoder
from cipo_jax.models.export import export_decoder
from cipo_jax.models.hf_config import decoder_config
from cipo_jax.models.names import tensors
from cipo_jax.models.weights import load_decoder

QWEN2, QWEN3, HYBRID = (checkpoints.CONFIGS[name] for name in ("qwen2_ratio7", "qwen3_v5", "qwen3_5_grouped"))


def stored_equal(loaded, want):
    got = decoding.by_tensor(loaded.config, loaded.params)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_table_has_the_published_names_and_shapes(name):
    hf = checkpoints.CONFIGS[name]
    table = {tensor.name: tensor.shape for tensor in tensors(decoder_config(hf))}
    assert table == checkpoints.expected_tensors(hf)


def sharded(folder, hf, values, files=3):
    """The same checkpoint as several files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    names, index = sorted(values), {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {name: values[name] for name in names[i::files]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_sharded_files_with_index_and_a_single_file(tmp_path):
    values = checkpoints.random_tensors(QWEN3)
    stored_equal(decoding.load(sharded(tmp_path / "many", QWEN3, values)), values)
    stored_equal(decoding.load(checkpoints.write(tmp_path / "one", QWEN3) / "model.safetensors"), values)


def test_multimodal_folder_gives_its_text_part_and_is_exported_whole(tmp_path):
    values = checkpoints.random_tensors(HYBRID)
    prefixed = {name.replace("model.", "model.language_model.", 1): value for name, value in values.items()}
    prefixed["model.visual.patch_embed.proj.weight"] = np.ones((2, 3), np.float32)
    prefixed["mtp.fc.weight"] = np.ones((3, 2), np.float16)
    hf = {"model_type": "qwen3_5", "text_config": HYBRID, "vision_config": {"depth": 2}, "tie_word_embeddings": True}
    loaded = decoding.load(checkpoints.write(tmp_path / "in", hf, prefixed))
    stored_equal(loaded, values)
    export_decoder(tmp_path / "out", loaded.config, loaded.params, loaded.checkpoint)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == prefixed.keys()
    assert all(np.array_equal(written[name], value) for name, value in prefixed.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == hf


def test_padded_vocabulary_is_trimmed_and_comes_back(tmp_path):
    values = checkpoints.random_tensors(QWEN2)
    extra = np.full((3, QWEN2["hidden_size"]), 9, np.float32)
    padded = values | {"model.embed_tokens.weight": np.concatenate([values["model.embed_tokens.weight"], extra])}
    loaded = decoding.load(checkpoints.write(tmp_path / "in", QWEN2, padded))
    stored_equal(loaded, values)
    export_decoder(tmp_path / "out", loaded.config, loaded.params, loaded.checkpoint)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(written[name], value) for name, value in padded.items())


def test_tied_head_in_the_file_must_equal_the_embedding(tmp_path):
    values = checkpoints.random_tensors(QWEN2)
    head = values["model.embed_tokens.weight"].copy()
    loaded = decoding.load(checkpoints.write(tmp_path / "same", QWEN2, values | {"lm_head.weight": head}))
    stored_equal(loaded, values)
    head[5, 5] += 1
    folder = checkpoints.write(tmp_path / "other", QWEN2, values | {"lm_head.weight": head})
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        decoding.load(folder)


def without(name):
    return lambda values: {key: value for key, value in values.items() if key != name}


NORM, UP = "model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight"
BROKEN = {
    "missing": (without(NORM), NORM.replace(".", r"\.") + " is missing"),
    "extra": (lambda v: v | {"model.layers.0.self_attn.q_proj.bias": v[NORM]}, r"q_proj\.bias has no place"),
    "shape": (
        lambda v: v | {UP: v[UP][:-1]},
        r"up_proj\.weight has shape \(47, 32\), config\.json asks for \(48, 32\)",
    ),
    "twice": (
        lambda v: v | {"model.language_model.norm.weight": v[NORM]},
        r"model\.norm\.weight.*both|both.*norm\.weight",
    ),
    "quantised": (lambda v: v | {UP: np.zeros((48, 32), np.int8)}, r"up_proj\.weight is stored as I8"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_tensor_is_refused_by_name(tmp_path, what):
    change, message = BROKEN[what]
    folder = checkpoints.write(tmp_path, QWEN3, change(checkpoints.random_tensors(QWEN3)))
    with pytest.raises(UserError, match=message):
        decoding.load(folder)


def test_broken_and_absent_files_are_refused_by_name(tmp_path):
    folder = checkpoints.write(tmp_path / "cut", QWEN3)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors is no complete safetensors file"):
        decoding.load(folder)
    folder = sharded(tmp_path / "many", QWEN3, checkpoints.random_tensors(QWEN3))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00003"):
        decoding.load(folder)
    with pytest.raises(UserError, match="nowhere does not exist"):
        decoding.load(tmp_path / "nowhere")


REFUSED = {
    "sliding_window": (QWEN2, {"use_sliding_window": True, "sliding_window": 64}),
    "sliding_attention": (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}),
    "yarn": (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "quantization_config": (QWEN3, {"quantization_config": {"quant_method": "fp8"}}),
    "attention_bias": (QWEN3, {"attention_bias": True}),
    "logit_softcap": (QWEN3, {"logit_softcap": 30.0}),
    "gelu": (QWEN2, {"hidden_act": "gelu"}),
    "mistral": (QWEN2, {"model_type": "mistral"}),
    "attn_output_gate": (HYBRID, {"attn_output_gate": False}),
    "short_factor": (QWEN2, {"rope_scaling": {"rope_type": "default", "short_factor": [1.0]}}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_change_the_computation_are_refused_by_name(what):
    hf, change = REFUSED[what]
    with pytest.raises(UserError, match=what.replace("sliding_attention", "sliding_window")):
        decoder_config(hf | change)


def test_settings_that_change_nothing_are_not():
    same = {"use_sliding_window": False, "sliding_window": 4096, "transformers_version": "5", "logit_softcap": None}
    assert decoder_config(QWEN2 | same) == decoder_config(QWEN2)
    assert decoder_config(QWEN2 | {"odd": 1}, ignore=["odd"]) == decoder_config(QWEN2)
    moved = {k: v for k, v in QWEN2.items() if k != "rope_theta"} | {"rope_parameters": {"rope_theta": 1e4}}
    assert decoder_config(moved) == decoder_config(QWEN2)


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3_5_odd"])
def test_bf16_round_trip_over_eight_devices_in_small_files(tmp_path, name):
    hf = checkpoints.CONFIGS[name] | {
        "hidden_size": 48,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if "linear_num_key_heads" in hf:
        hf |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    values = {
        key: value if key.endswith(("A_log", "linear_attn.norm.weight")) else value.astype(ml_dtypes.bfloat16)
        for key, value in checkpoints.random_tensors(hf).items()
    }
    folder = checkpoints.write(tmp_path / "in", hf, values)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    rules = ShardingRules(mesh(fsdp=4, tensor=2))
    loaded = load_decoder(folder, rules, param_dtype="bfloat16")
    files = export_decoder(tmp_path / "out", loaded.config, loaded.params, loaded.checkpoint, shard_bytes=20_000)
    assert len(set(files.values())) > 2
    written = {}
    for file in set(files.values()):
        assert (tmp_path / "out" / file).stat().st_size < 24_000 + 4_000
        written |= load_file(tmp_path / "out" / file)
    assert written.keys() == values.keys()
    for key, value in values.items():
        assert written[key].dtype == value.dtype, key
        assert np.array_equal(written[key], value), key
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    again = load_decoder(tmp_path / "out", rules, param_dtype="bfloat16")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, loaded.params))


def test_cast_keeps_what_must_stay_float32(tmp_path):
    config = decoder_config(HYBRID)
    _, params = init_decoder(config, 0, decoding.one_device())
    dtypes = {path[-1]: v.get_value().dtype for path, v in nnx.to_flat_state(cast(params, jnp.bfloat16))}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == {"A_log", "dt_bias", "norm"}


def test_a_fresh_export_carries_its_dtype_and_generation_settings(tmp_path):
    config = decoder_config(HYBRID, param_dtype="bfloat16")
    _, params = init_decoder(config, 0, decoding.one_device())
    export_decoder(tmp_path, config, params, dtype="float16", generation={"eos_token_id": [3, 4]})
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["eos_token_id"] == [3, 4]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [3, 4]}
    assert decoder_config(hf) == decoder_config(HYBRID)
    written = load_file(tmp_path / "model.safetensors")
    kept = {name for name, value in written.items() if value.dtype == np.float32}
    assert kept == {name for name in written if name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))}
