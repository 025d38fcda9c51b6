"""GGUF files: block formats against the gguf package, layouts against llama.cpp's conversions written out here."""

import decoding
import gguf
import ml_dtypes
import numpy as np
import pytest
import random_checkpoints as checkpoints

from cipo_jax.errors import UserError
from cipo_jax.models.gguf_files import BLOCKS, decode
from cipo_jax.models.hf_config import decoder_config

SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}  # bytes of a block's float16 scales


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_decode_like_the_gguf_package(kind):
    rng, size = np.random.default_rng(0), BLOCKS[kind][0]
    raw = rng.integers(0, 256, (12, 2 * size)).astype(np.uint8)
    blocks = raw.reshape(-1, size)
    for at in SCALES[kind]:  # random bytes make NaN scales
        blocks[:, at : at + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(decode(raw, kind, want.shape), want)


def permuted(weight, heads):
    """llama.cpp's order of Llama's query and key rows: the halves of every head interleaved."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for h in range(heads):
        for i in range(size // 2):
            out[h * size + 2 * i] = weight[h * size + i]
            out[h * size + 2 * i + 1] = weight[h * size + size // 2 + i]
    return out


def tiled(weight, keys, values, size):
    """llama.cpp's order of Qwen3.5's value heads: head j of every key head, then head j + 1."""
    group = values // keys
    order = [key * group + j for j in range(group) for key in range(keys)]
    return np.concatenate([weight[h * size : (h + 1) * size] for h in order])


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip


def gguf_tensor(hf, name, value):
    """The name and value that llama.cpp's converter writes."""
    arch = hf["model_type"]
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", value
    if name == "lm_head.weight":
        return "output.weight", value
    shift = arch == "qwen3_5_text" and name.endswith("norm.weight") and "linear_attn" not in name
    value = value + 1 if shift else value
    if name == "model.norm.weight":
        return "output_norm.weight", value
    _, _, layer, rest = name.split(".", 3)
    if rest == "post_attention_layernorm.weight":
        return f"blk.{layer}." + ("post_attention_norm" if arch == "qwen3_5_text" else "ffn_norm") + ".weight", value
    if arch == "llama" and rest.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        value = permuted(value, hf["num_attention_heads" if "q_proj" in rest else "num_key_value_heads"])
    if "linear_attn" in rest:
        keys, values, size = (hf[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "value_head_dim"))
        leaf = rest.removeprefix("linear_attn.")
        fixed = 2 * keys * hf["linear_key_head_dim"]
        if leaf == "conv1d.weight":
            value = value[:, 0]
        if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
            value = np.concatenate([value[:fixed], tiled(value[fixed:], keys, values, size)])
        elif leaf == "in_proj_z.weight":
            value = tiled(value, keys, values, size)
        elif leaf == "out_proj.weight":
            value = tiled(value.T, keys, values, size).T
        elif leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            value = tiled(value, keys, values, 1)
        if leaf == "A_log":
            return f"blk.{layer}.ssm_a", -np.exp(value)
        if leaf == "dt_bias":
            return f"blk.{layer}.ssm_dt.bias", value
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{kind}", value


ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}


def write(path, hf, values):
    """A GGUF file of a checkpoint, through the gguf package."""
    arch = ARCHITECTURES[hf["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    for key, field in {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", hf[field])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", hf["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", hf.get("rope_theta", 1e4))
    if "head_dim" in hf:
        writer.add_uint32(f"{arch}.attention.key_length", hf["head_dim"])
    if arch == "qwen35":
        for key, value in {
            "ssm.conv_kernel": 4, "ssm.state_size": hf["linear_key_head_dim"], "ssm.group_count": hf["linear_num_key_heads"],
            "ssm.time_step_rank": hf["linear_num_value_heads"], "rope.dimension_count": hf["head_dim"] // 4,
            "ssm.inner_size": hf["linear_num_value_heads"] * hf["linear_value_head_dim"],
        }.items():  # fmt: skip
            writer.add_uint32(f"{arch}.{key}", value)
    for name, value in values.items():
        writer.add_tensor(*gguf_tensor(hf, name, value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama_ratio3", "qwen2_untied", "qwen3_ratio3", "qwen3_5_grouped"])
def test_a_gguf_file_gives_the_checkpoint_it_was_converted_from(tmp_path, name):
    hf, values = checkpoints.CONFIGS[name], checkpoints.random_tensors(checkpoints.CONFIGS[name])
    write(tmp_path / "model.gguf", hf, values)
    loaded = decoding.load(tmp_path)
    assert loaded.config == decoder_config(hf)
    for key, got in decoding.by_tensor(loaded.config, loaded.params).items():
        np.testing.assert_allclose(got, values[key], rtol=1e-6, atol=3e-7, err_msg=key)  # norms +- 1, log(exp)


def test_half_precision_and_a_type_that_is_not_supported(tmp_path):
    hf, values = checkpoints.CONFIGS["llama_ratio3"], checkpoints.random_tensors(checkpoints.CONFIGS["llama_ratio3"])
    half = {name: value.astype(np.float16) if value.ndim > 1 else value for name, value in values.items()}
    write(tmp_path / "half.gguf", hf, half)
    loaded = decoding.load(tmp_path / "half.gguf")
    got = decoding.by_tensor(loaded.config, loaded.params)
    assert all(np.array_equal(got[name], value.astype(np.float32)) for name, value in half.items())
    bf16 = values["model.norm.weight"].astype(ml_dtypes.bfloat16)
    assert np.array_equal(decode(bf16.view(np.uint8), "BF16", bf16.shape), bf16)
    write(tmp_path / "wide.gguf", hf, values | {"model.norm.weight": values["model.norm.weight"].astype(np.float64)})
    with pytest.raises(UserError, match=r"output_norm\.weight is of type F64"):
        decoding.load(tmp_path / "wide.gguf")


def test_a_broken_file_and_an_unknown_architecture_are_refused(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(4))
    with pytest.raises(UserError, match=r"broken\.gguf"):
        decoding.load(tmp_path / "broken.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="gemma3"):
        decoding.load(tmp_path / "other.gguf")
