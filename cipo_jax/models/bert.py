"""BERT passage encoder (MiniLM, E5): pure functions on a tree of stacked weights.

Letters: B texts, L padded tokens, H hidden size, N heads, D head size, F feed-forward size, Y layers.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from cipo_jax.errors import UserError

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT encoder, named as in Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_eps: float = 1e-12

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_file(cls, path: Path) -> "BertConfig":
        """Reads `config.json`; raises `UserError` for a model that is not a plain BERT."""
        try:
            fields = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"encoder config {str(path)!r} cannot be read ({error}); give a folder with it") from None
        wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for name, value in wanted.items():
            if fields.get(name, value) != value:
                raise UserError(f"{path}: {name}={fields[name]!r} is not supported; the encoder must have {value!r}")
        names = [f.name for f in dataclasses.fields(cls)]
        missing = [n for n in names if n not in fields and n != "layer_norm_eps"]
        if missing:
            raise UserError(f"{path}: {', '.join(missing)} missing; give a complete BERT config")
        return cls(**{name: fields[name] for name in names if name in fields})


# Hugging Face name behind an optional `bert.` prefix -> (place in our tree, axes: linear weights are stored [out, in]).
_EMBEDDINGS = {
    "embeddings.word_embeddings.weight": "word",
    "embeddings.position_embeddings.weight": "position",
    "embeddings.token_type_embeddings.weight": "token_type",
    "embeddings.LayerNorm.weight": "norm_scale",
    "embeddings.LayerNorm.bias": "norm_bias",
}
_LAYER = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "ffn_norm",
}
_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_UNUSED = re.compile(r"(pooler\..*|cls\..*|embeddings\.position_ids)")


def _layer_shapes(c: BertConfig) -> dict[str, tuple[int, ...]]:
    h, f = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("query", "key", "value", "out"):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (h, h), (h,)
    shapes["up.weight"], shapes["up.bias"] = (f, h), (f,)
    shapes["down.weight"], shapes["down.bias"] = (h, f), (h,)
    for name in ("attention_norm", "ffn_norm"):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (h,), (h,)
    return shapes


def load_bert(folder: str | Path, config: BertConfig) -> Params:
    """Reads `model.safetensors` in `folder` as float32 numpy arrays, linear weights transposed to `[in, out]`.

    Every needed tensor must be there once with its shape; pooler and language-model heads are ignored.
    Raises `UserError` naming the tensor that is missing, unknown or has another shape.
    """
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        raise UserError(f"encoder weights {str(path)!r} do not exist; give a folder with model.safetensors")
    layer_shapes = _layer_shapes(config)
    shapes = {
        "word": (config.vocab_size, config.hidden_size),
        "position": (config.max_position_embeddings, config.hidden_size),
        "norm_scale": (config.hidden_size,),
        "norm_bias": (config.hidden_size,),
    }
    found: dict[str, np.ndarray] = {}
    with safe_open(path, framework="numpy") as file:
        for full_name in file.keys():  # noqa: SIM118 - a safetensors handle, not a dict
            name = full_name.removeprefix("bert.")
            if _UNUSED.fullmatch(name):
                continue
            match = _LAYER_NAME.fullmatch(name)
            if name in _EMBEDDINGS:
                place = _EMBEDDINGS[name]
                shape = shapes.get(place)
            elif match and match[2] in _LAYER and int(match[1]) < config.num_hidden_layers:
                part = f"{_LAYER[match[2]]}.{match[3]}"
                place, shape = f"{match[1]}.{part}", layer_shapes[part]
            else:
                raise UserError(
                    f"{path}: tensor {full_name!r} is not part of this BERT; give weights that match config.json"
                )
            tensor = file.get_tensor(full_name)
            if shape is not None and tensor.shape != shape:
                raise UserError(f"{path}: tensor {full_name!r} has shape {tensor.shape}, config.json says {shape}")
            if place in found:
                raise UserError(f"{path}: tensor {full_name!r} occurs twice; remove one")
            found[place] = tensor.astype(np.float32)

    def take(place: str) -> np.ndarray:
        if place not in found:
            raise UserError(f"{path}: the tensor for {place!r} is missing; give complete weights")
        return found[place]

    def stack(part: str) -> np.ndarray:
        arrays = [take(f"{layer}.{part}") for layer in range(config.num_hidden_layers)]
        return np.stack([a.T if a.ndim == 2 else a for a in arrays])

    layers = {part.replace(".", "_"): stack(part) for part in layer_shapes}
    for kind in ("weight", "bias"):  # one matmul for the three projections
        layers[f"qkv_{kind}"] = np.concatenate([layers.pop(f"{n}_{kind}") for n in ("query", "key", "value")], -1)
    return {
        "word": take("word"),
        "position": take("position") + take("token_type")[0],  # every token is of type 0
        "norm_scale": take("norm_scale"),
        "norm_bias": take("norm_bias"),
        "layers": layers,
    }


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Normalises the last axis of `[B, L, H]` in float32; `scale` and `bias` are `[H]`."""
    y = x.astype(jnp.float32)
    centred = y - y.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (y * scale[None, None] + bias[None, None]).astype(x.dtype)


def bert_hidden(params: Params, config: BertConfig, ids_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """The last layer's hidden states.

    Args:
      params: `load_bert`'s tree, float32 or bfloat16; activations take its dtype, softmax and norms are float32.
      config: its sizes.
      ids_BL: `[B, L]` int32 token ids, `L <= max_position_embeddings`.
      mask_BL: `[B, L]` bool, True on tokens. Padding is never attended to.

    Returns:
      `[B, L, H]`; undefined on padding.
    """
    batch, length = ids_BL.shape
    heads, head_dim, eps = config.num_attention_heads, config.head_dim, config.layer_norm_eps
    dtype = params["word"].dtype
    # TPUs and GPUs round float32 matmul operands by default; float32 weights ask for float32 results.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    bias_B11K = jnp.where(mask_BL, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]

    def linear(x, layer, name):
        return jnp.matmul(x, layer[f"{name}_weight"], precision=precision) + layer[f"{name}_bias"][None, None]

    def block(x_BLH, layer):
        qkv = linear(x_BLH, layer, "qkv").reshape(batch, length, 3, heads, head_dim)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))  # [B, N, L, D]
        scores = jnp.einsum("BNQD,BNKD->BNQK", q * head_dim**-0.5, k, precision=precision)
        weights = jax.nn.softmax(scores.astype(jnp.float32) + bias_B11K, axis=-1).astype(dtype)
        mixed = jnp.einsum("BNQK,BNKD->BNQD", weights, v, precision=precision)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x_BLH = layer_norm(
            x_BLH + linear(mixed, layer, "out"), layer["attention_norm_weight"], layer["attention_norm_bias"], eps
        )
        up = jax.nn.gelu(linear(x_BLH, layer, "up"), approximate=False)
        return layer_norm(
            x_BLH + linear(up, layer, "down"), layer["ffn_norm_weight"], layer["ffn_norm_bias"], eps
        ), None

    x = jnp.asarray(params["word"])[ids_BL] + params["position"][None, :length]
    x = layer_norm(x, params["norm_scale"], params["norm_bias"], eps)
    return jax.lax.scan(block, x, params["layers"])[0]


def pool(hidden_BLH: jax.Array, mask_BL: jax.Array, pooling: str = "mean", normalise: bool = True) -> jax.Array:
    """Turns hidden states into one vector per text.

    Args:
      hidden_BLH: `[B, L, H]`.
      mask_BL: `[B, L]` bool.
      pooling: `mean` over the masked tokens, or `cls`, the first token.
      normalise: scale to unit L2 norm.

    Returns:
      `[B, H]` float32.
    """
    hidden = hidden_BLH.astype(jnp.float32)
    if pooling == "mean":
        mask = mask_BL[:, :, None]
        pooled = jnp.where(mask, hidden, 0.0).sum(1) / jnp.maximum(mask.sum(1), 1)
    elif pooling == "cls":
        pooled = hidden[:, 0]
    else:
        raise UserError(f"pooling={pooling!r} is not one of mean, cls")
    if normalise:
        pooled = pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    return pooled
