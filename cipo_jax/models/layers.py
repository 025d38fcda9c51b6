"""The parts of a decoder layer. Shapes: B rows, L tokens, D width, H query heads, K key-value heads, E head_dim, F ffn."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.models.config import DecoderConfig


def parameter(
    rngs: nnx.Rngs,
    shape,
    axes,
    config: DecoderConfig,
    init: float | Callable | None = None,
    dtype: str | None = None,
) -> nnx.Param:
    """A parameter whose dimensions carry the logical names `axes`.

    Args:
      rngs: source of random keys.
      shape: its shape.
      axes: one logical name per dimension.
      config: gives the dtype.
      init: the std of a normal distribution, `init(key, shape)`, or None for ones.
      dtype: overrides the config's; such a parameter keeps it in every copy of the model (`decoder.cast`).
    """
    if init is None:
        value = jnp.ones(shape)
    elif callable(init):
        value = init(rngs.params(), shape)
    else:
        value = init * jax.random.normal(rngs.params(), shape, jnp.float32)
    value = value.astype(jnp.dtype(dtype or config.param_dtype))
    return nnx.Param(value, logical=tuple(axes), fixed_dtype=dtype)


def zeros(_, shape):
    """An initialiser."""
    return jnp.zeros(shape)


def normalised(x, eps: float):
    """`x rsqrt(mean x^2 + eps)` in float32."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)


def trailing(weight, x, dtype=None):
    """`weight` with leading dimensions of size 1, so that it multiplies the last ones of `x`."""
    weight = weight.astype(dtype or x.dtype)
    return jnp.expand_dims(weight, range(x.ndim - weight.ndim))


class RMSNorm(nnx.Module):
    """`x rsqrt(mean x^2 + eps) w` (or `1 + w` where the config's norms are zero-centred), computed in float32."""

    def __init__(self, size: int, config: DecoderConfig, rngs: nnx.Rngs):
        self.eps, self.offset = config.norm_eps, 1.0 if config.zero_centred else 0.0
        self.scale = parameter(rngs, (size,), ("norm",), config, zeros if config.zero_centred else None)

    def __call__(self, x):
        y = normalised(x, self.eps)
        return (y * (self.offset + trailing(self.scale[...], y))).astype(x.dtype)


def rope_frequencies(config: DecoderConfig):
    """The angle per position of every rotated pair, `[rotary_dim / 2]` float32."""
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_llama3 is None:
        return frequency
    # Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, and those between blended.
    factor, low, high, original = config.rope_llama3
    turns = original * frequency / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1 - kept) / factor)


def rope_tables(positions_BL, config: DecoderConfig):
    """Cosines and sines `[B, L, 1, rotary_dim / 2]` in float32 for rotary position embedding."""
    angle = positions_BL.astype(jnp.float32)[..., None] * rope_frequencies(config)[None, None, :]
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x_BLHE, tables):
    """Applies rotary position embedding in the half-split layout to the first components of every head."""
    cos, sin = tables
    size = cos.shape[-1]
    x = x_BLHE.astype(jnp.float32)
    a, b, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_BLHE.dtype)


def dense(x, weight, inputs: int = 1):
    """`x` times `weight`, contracted over the last `inputs` dimensions of `x` and the first of `weight`.

    As one matrix product of two dimensions: the weight's gradient of a product with several leading dimensions takes
    XLA's CPU backend three times as long.
    """
    weight = weight[...].astype(x.dtype)
    leading, outer = x.shape[: x.ndim - inputs], weight.shape[inputs:]
    flat = x.reshape(math.prod(leading), -1) @ weight.reshape(math.prod(weight.shape[:inputs]), -1)
    return flat.reshape(*leading, *outer)


class Attention(nnx.Module):
    """Grouped-query attention; what a token sees is decided by the context."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, std = config, config.width**-0.5
        self.config = config
        self.query = parameter(rngs, (c.width, c.heads, c.head_dim), ("embed", "heads", "head_dim"), c, std)
        self.key = parameter(rngs, (c.width, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), c, std)
        self.value = parameter(rngs, (c.width, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), c, std)
        out_std = (c.heads * c.head_dim) ** -0.5 / math.sqrt(2 * c.depth)
        self.out = parameter(rngs, (c.heads, c.head_dim, c.width), ("heads", "head_dim", "embed"), c, out_std)
        if c.gated:
            self.gate = parameter(rngs, (c.width, c.heads, c.head_dim), ("embed", "heads", "head_dim"), c, std)
        if c.qkv_bias:
            self.query_bias = parameter(rngs, (c.heads, c.head_dim), ("heads", "head_dim"), c, zeros)
            self.key_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), c, zeros)
            self.value_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), c, zeros)
        if c.qk_norm:
            self.query_norm = RMSNorm(c.head_dim, c, rngs)
            self.key_norm = RMSNorm(c.head_dim, c, rngs)

    def __call__(self, x_BLD, tables, context, cache, layer):
        c = self.config
        q, k, v = dense(x_BLD, self.query), dense(x_BLD, self.key), dense(x_BLD, self.value)
        if c.qkv_bias:
            q, k, v = (
                y + trailing(b[...], y) for y, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias))
            )
        if c.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, tables), rotate(k, tables)
        out_BLHE, cache = context.attention(q, k, v, cache, layer)
        if c.gated:
            out_BLHE = out_BLHE * jax.nn.sigmoid(dense(x_BLD, self.gate))
        return dense(out_BLHE, self.out, inputs=2), cache


class SwiGLU(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, std = config, config.width**-0.5
        self.gate = parameter(rngs, (c.width, c.ffn), ("embed", "ffn"), c, std)
        self.up = parameter(rngs, (c.width, c.ffn), ("embed", "ffn"), c, std)
        self.down = parameter(rngs, (c.ffn, c.width), ("ffn", "embed"), c, c.ffn**-0.5 / math.sqrt(2 * c.depth))

    def __call__(self, x):
        return dense(jax.nn.silu(dense(x, self.gate)) * dense(x, self.up), self.down)


class Layer(nnx.Module):
    """A pre-norm residual layer around a token mixer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, mixer=Attention):
        self.mixer_norm = RMSNorm(config.width, config, rngs)
        self.mixer = mixer(config, rngs)
        self.mlp_norm = RMSNorm(config.width, config, rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x, tables, context, cache, layer):
        with jax.named_scope("mixer"):
            y, cache = self.mixer(self.mixer_norm(x), tables, context, cache, layer)
        x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), cache
