"""GGUF checkpoints, dequantised one tensor at a time and presented under Hugging Face names.

The `gguf` package (extra `gguf`) parses the file's directory; the block formats are decoded here, in float32. Layouts are
those of llama.cpp's `ggml-quants` and `convert_hf_to_gguf.py`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cipo_jax.errors import UserError

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen35": "qwen3_5_text"}

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_SKIPPED = re.compile(r"^rope_freqs\.weight$|\.nextn\.")


def _half(blocks, at: int):
    """float16 scales at byte `at` of every block, as a float32 column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed):
    """Low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def q8_0(blocks):
    return _half(blocks, 0) * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


def q4_0(blocks):
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks):
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def q4_k(blocks):
    """256 values: 8 sub-blocks with 6-bit scales and minima, packed in 12 bytes."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1).astype(np.float32)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1).astype(np.float32)
    q = blocks[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    q = q.reshape(-1, 8, 32).astype(np.float32)
    return (_half(blocks, 0) * scale)[..., None] * q - (_half(blocks, 2) * least)[..., None]


def q6_k(blocks):
    """256 values: 16 sub-blocks with 8-bit scales; 4 low bits and 2 high bits apart."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[None, None, :, None] & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None] & 3
    q = (low.reshape(-1, 256) | (high.reshape(-1, 256) << 4)).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    return scale[..., None] * q.reshape(-1, 16, 16)


# type name -> (bytes of a block, its decoder); plain types have none
BLOCKS: dict[str, tuple[int, Callable]] = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
}
PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def decode(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's bytes as an array of `shape`; float32 if `kind` is a quantised type."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if kind in PLAIN:
        return flat.view(PLAIN[kind]).reshape(shape)
    size, decoder = BLOCKS[kind]
    return decoder(flat.reshape(-1, size)).reshape(shape)


class GGUFCheckpoint:
    """A GGUF file as a `weights.Checkpoint`; `hf` is the `config.json` that its metadata amounts to."""

    def __init__(self, path: str | Path):
        """Opens a file.

        Raises:
          UserError: the extra is missing, the file is broken, of an unsupported architecture or tensor type, or has a
            tensor that no name maps.
        """
        try:
            import gguf
        except ImportError as error:
            raise UserError("reading a .gguf file needs the package gguf; pip install 'cipo_jax[gguf]'.") from error
        self.file, self.folder = Path(path), Path(path).parent
        try:
            self._reader = gguf.GGUFReader(self.file)
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{path} is no complete GGUF file ({error}); fetch it again.") from error
        self.stored: dict[str, str] = {}
        self.skipped: list[str] = []
        self._tensors: dict[str, Any] = {}
        self.architecture = self.field("general.architecture")
        # speculative layers come behind the decoder's and are counted with them
        self.depth = self.field("{arch}.block_count", 0) - self.field("{arch}.nextn_predict_layers", 0)
        for tensor in self._reader.tensors:
            layer = re.match(r"blk\.(\d+)\.", tensor.name)
            if _SKIPPED.search(tensor.name) or (layer and int(layer[1]) >= self.depth):
                self.skipped.append(tensor.name)
                continue
            name = _canonical(tensor.name) or tensor.name
            if name in self.stored:
                raise UserError(f"{self.stored[name]} and {tensor.name} are both {name}; the file is broken.")
            self.stored[name], self._tensors[name] = tensor.name, tensor
        self.hf = self._config()

    def field(self, name: str, default=None):
        """A metadata value; `{arch}` stands for the architecture."""
        field = self._reader.fields.get(name.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape under Hugging Face's convention (output first)."""
        shape = tuple(int(n) for n in reversed(self._tensors[name].shape))
        return (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") else shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` returns."""
        kind = self._kind(name)
        return PLAIN.get(kind, np.dtype(np.float32))

    def _kind(self, name: str) -> str:
        import gguf

        kind = gguf.GGMLQuantizationType(self._tensors[name].tensor_type).name
        if kind not in PLAIN and kind not in BLOCKS:
            raise UserError(
                f"{self.file.name}: {self.stored[name]} is of type {kind}; supported are {', '.join([*PLAIN, *BLOCKS])}."
            )
        return kind

    def read(self, name: str) -> np.ndarray:
        """The dequantised tensor, its rows and values as transformers keeps them."""
        array = decode(self._tensors[name].data, self._kind(name), self.shape(name))
        if self.architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.weight$", name):
            heads = self.hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            # llama.cpp interleaves the two halves that RoPE turns against each other
            return array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if self.architecture == "qwen35":
            array = self._undo_qwen35(name, array)
        return array

    def _undo_qwen35(self, name: str, array: np.ndarray) -> np.ndarray:
        """What llama.cpp's converter did: norms shifted, rates as `-exp`, value heads tiled over the key heads."""
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return array.astype(np.float32) - 1
        if name.endswith("A_log"):
            array = np.log(-array.astype(np.float32))
        keys, values = self.hf["linear_num_key_heads"], self.hf["linear_num_value_heads"]
        size, group = self.hf["linear_value_head_dim"], values // keys

        def rows(x, each):  # heads tiled (group, key) -> repeated (key, group)
            return x.reshape(group, keys, each, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

        leaf = name.rsplit("linear_attn.", 1)[-1]
        if leaf in ("in_proj_z.weight",):
            return rows(array, size)
        if leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            return rows(array, 1)
        if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
            fixed = 2 * keys * self.hf["linear_key_head_dim"]
            return np.concatenate([array[:fixed], rows(array[fixed:], size)])
        if leaf == "out_proj.weight":
            return rows(array.T, size).T
        return array

    def _config(self) -> dict[str, Any]:
        arch = self.architecture
        if arch not in _ARCHITECTURES:
            raise UserError(
                f"{self.file}: architecture {arch!r} is not supported; supported are {sorted(_ARCHITECTURES)}."
            )

        def need(name):
            value = self.field(f"{{arch}}.{name}")
            if value is None:
                raise UserError(f"{self.file}: the metadata {arch}.{name} is missing.")
            return value

        heads, width, _ = need("attention.head_count"), need("embedding_length"), need("block_count")
        scaling = self.field("{arch}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self.skipped:
            raise UserError(
                f"{self.file}: RoPE scaling ({scaling}) is not read from GGUF files; use the HF checkpoint."
            )
        hf = dict(
            model_type=_ARCHITECTURES[arch],
            vocab_size=self.shape("model.embed_tokens.weight")[0] if "model.embed_tokens.weight" in self.stored else 0,
            hidden_size=width,
            num_hidden_layers=self.depth,
            num_attention_heads=heads,
            num_key_value_heads=self.field("{arch}.attention.head_count_kv", heads),
            head_dim=self.field("{arch}.attention.key_length", width // heads),
            intermediate_size=need("feed_forward_length"),
            rms_norm_eps=float(np.float32(need("attention.layer_norm_rms_epsilon"))),
            rope_theta=float(self.field("{arch}.rope.freq_base", 10000.0)),
            tie_word_embeddings="lm_head.weight" not in self.stored,
            max_position_embeddings=self.field("{arch}.context_length", 32768),
        )
        # float32 metadata; the settings are round decimals
        hf["rms_norm_eps"] = float(f"{hf['rms_norm_eps']:.6g}")
        for name in ("bos", "eos"):
            hf[f"{name}_token_id"] = self.field(f"tokenizer.ggml.{name}_token_id")
        if arch == "qwen35":
            rank, inner = need("ssm.time_step_rank"), need("ssm.inner_size")
            hf |= dict(
                linear_num_key_heads=need("ssm.group_count"),
                linear_num_value_heads=rank,
                linear_key_head_dim=need("ssm.state_size"),
                linear_value_head_dim=inner // rank,
                linear_conv_kernel_dim=need("ssm.conv_kernel"),
                full_attention_interval=self.field("{arch}.full_attention_interval", 4),
                partial_rotary_factor=need("rope.dimension_count") / hf["head_dim"],
            )
        return hf


def _canonical(name: str) -> str | None:
    if name in _NAMES:
        return _NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}"
    return None
