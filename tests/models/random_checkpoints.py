"""Small random Hugging Face checkpoints, made with numpy alone so that every machine makes the same ones.

Tensor names and shapes are spelt out here, apart from `cipo_jax.models.names`, so that the table there is tested.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "vocab_size": 61}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}


def shape(kind, width, layers, heads, kv, ffn, tied, head_dim=None, theta=1e4, **more):
    config = COMMON | {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "tie_word_embeddings": tied, "rope_theta": theta, **more,
    }  # fmt: skip
    return config | ({"head_dim": head_dim} if head_dim else {})


def hybrid(width, layers, heads, kv, ffn, tied, key_heads, value_heads, dk, dv, **more):
    config = shape("qwen3_5_text", width, layers, heads, kv, ffn, tied, **(DELTA | more))
    del config["rope_theta"]
    return config | {
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": dk, "linear_value_head_dim": dv,
    }  # fmt: skip


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}

# Odd head counts, GQA ratios 1, 3 and 7, heads x head_dim unlike the width, both RoPE layouts.
CONFIGS = {
    "qwen2_ratio7": shape("qwen2", 56, 3, 7, 1, 40, True),
    "qwen2_untied": shape("qwen2", 48, 2, 3, 1, 72, False),
    "qwen3_ratio3": shape("qwen3", 40, 3, 9, 3, 64, True, 16),
    "qwen3_v5": shape("qwen3", 32, 2, 5, 5, 48, False, 8, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama_ratio3": shape("llama", 72, 3, 9, 3, 56, True),
    "llama3_rope": shape("llama", 32, 2, 4, 4, 48, False, rope_scaling=LLAMA3),
    "qwen3_5_grouped": hybrid(40, 4, 3, 1, 56, True, 3, 6, 16, 8),
    "qwen3_5_odd": hybrid(48, 8, 7, 1, 40, False, 5, 5, 16, 24),
}


def expected_tensors(hf: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, from the published architectures."""
    d, h, kv = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    ffn, vocab = hf["intermediate_size"], hf["vocab_size"]
    kind, e = hf["model_type"], hf.get("head_dim") or d // h
    out = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not hf["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, d)
    for i in range(hf["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {
            f"{at}input_layernorm.weight": (d,),
            f"{at}post_attention_layernorm.weight": (d,),
            f"{at}mlp.gate_proj.weight": (ffn, d),
            f"{at}mlp.up_proj.weight": (ffn, d),
            f"{at}mlp.down_proj.weight": (d, ffn),
        }
        if kind == "qwen3_5_text" and (i + 1) % 4:
            kh, vh = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
            dk, dv = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
            channels = 2 * kh * dk + vh * dv
            out |= {
                f"{at}linear_attn.in_proj_qkv.weight": (channels, d),
                f"{at}linear_attn.in_proj_z.weight": (vh * dv, d),
                f"{at}linear_attn.in_proj_b.weight": (vh, d),
                f"{at}linear_attn.in_proj_a.weight": (vh, d),
                f"{at}linear_attn.conv1d.weight": (channels, 1, 4),
                f"{at}linear_attn.A_log": (vh,),
                f"{at}linear_attn.dt_bias": (vh,),
                f"{at}linear_attn.norm.weight": (dv,),
                f"{at}linear_attn.out_proj.weight": (d, vh * dv),
            }
            continue
        gated = 2 if kind == "qwen3_5_text" else 1
        out |= {
            f"{at}self_attn.q_proj.weight": (gated * h * e, d),
            f"{at}self_attn.k_proj.weight": (kv * e, d),
            f"{at}self_attn.v_proj.weight": (kv * e, d),
            f"{at}self_attn.o_proj.weight": (d, h * e),
        }
        if kind in ("qwen3", "qwen3_5_text"):
            out |= {f"{at}self_attn.q_norm.weight": (e,), f"{at}self_attn.k_norm.weight": (e,)}
        if kind == "qwen2":
            out |= {f"{at}self_attn.{k}_proj.bias": (n * e,) for k, n in (("q", h), ("k", kv), ("v", kv))}
    return out


def tensor(name: str, shape: tuple[int, ...], centred: bool) -> np.ndarray:
    """A value for a tensor, determined by its name and shape."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    normal = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.01, 1, shape)).astype(np.float32)
    if "norm" in name:
        return 0.2 * normal + (0.0 if centred and "linear_attn" not in name else 1.0).__float__()
    if "conv1d" in name:
        # Mostly the token itself: silu then makes queries and keys mostly positive, as in trained models. Orthogonal ones
        # give tiny outputs whose normalisation multiplies rounding errors, in any implementation.
        return 0.2 * normal + np.float32([0.1, 0.1, 0.2, 1.0])
    if name.endswith("bias"):
        return 0.3 * normal
    scale = (
        2.0
        if "embed" in name or "lm_head" in name
        else 0.6
        if "o_proj" in name or "down" in name or "out_proj" in name
        else 1.2
    )
    return normal * np.float32(scale / np.sqrt(shape[-1]))


def random_tensors(hf: dict) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint in float32."""
    centred = hf["model_type"] == "qwen3_5_text"
    return {
        name: np.ascontiguousarray(tensor(name, shape, centred), np.float32)
        for name, shape in expected_tensors(hf).items()
    }


def write(folder: Path, hf: dict, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint folder with one file, written by the safetensors package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors or random_tensors(hf), folder / "model.safetensors", {"format": "pt"})
    return folder


LENGTHS = (1, 2, 63, 64, 65, 130, 257)


def tokens(length: int, rows: int = 2) -> np.ndarray:
    """int64 ids `[rows, length]`."""
    return np.random.Generator(np.random.PCG64(length)).integers(0, COMMON["vocab_size"], (rows, length))


GRADIENT_LENGTH = 65


def places(length: int) -> list[int]:
    """The rows whose logits are kept."""
    return sorted({0, length // 2, max(0, length - 2), length - 1})


def sampled(gradient: np.ndarray) -> np.ndarray:
    """Sixteen entries of a gradient, and its norm."""
    flat = gradient.reshape(-1)
    pick = np.random.Generator(np.random.PCG64(flat.size)).integers(0, flat.size, 16)
    return np.append(flat[pick], np.linalg.norm(flat)).astype(np.float32)
