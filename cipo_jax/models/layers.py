"""The parts of a decoder layer. Shapes: B rows, L tokens, D width, H query heads, K key-value heads, E head_dim, F ffn."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.models.config import DecoderConfig


def parameter(rngs: nnx.Rngs, shape, axes, config: DecoderConfig, scale: float | None = None) -> nnx.Param:
    """A parameter whose dimensions carry the logical names `axes`; normal with std `scale`, or ones if None."""
    dtype = jnp.dtype(config.param_dtype)
    if scale is None:
        value = jnp.ones(shape, dtype)
    else:
        value = (scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
    return nnx.Param(value, logical=tuple(axes))


class RMSNorm(nnx.Module):
    """`x rsqrt(mean x^2 + eps) w`, computed in float32."""

    def __init__(self, size: int, config: DecoderConfig, rngs: nnx.Rngs):
        self.eps = config.norm_eps
        self.scale = parameter(rngs, (size,), ("norm",), config)

    def __call__(self, x):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (y * jnp.expand_dims(scale, range(y.ndim - 1))).astype(x.dtype)


def rope_tables(positions_BL, head_dim: int, theta: float):
    """Cosines and sines `[B, L, 1, head_dim / 2]` in float32 for rotary position embedding."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = (1.0 / theta**exponent)[None, None, :]
    angle = positions_BL.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]


def rotate(x_BLHE, tables):
    """Applies rotary position embedding in the half-split layout."""
    cos, sin = tables
    a, b = jnp.split(x_BLHE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHE.dtype)


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
        if c.qkv_bias:
            self.query_bias = parameter(rngs, (c.heads, c.head_dim), ("heads", "head_dim"), c, 0.0)
            self.key_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), c, 0.0)
            self.value_bias = parameter(rngs, (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"), c, 0.0)
        if c.qk_norm:
            self.query_norm = RMSNorm(c.head_dim, c, rngs)
            self.key_norm = RMSNorm(c.head_dim, c, rngs)

    def __call__(self, x_BLD, tables, context, cache, layer):
        c = self.config

        def project(weight):
            return jnp.einsum("bld,dhe->blhe", x_BLD, weight[...].astype(x_BLD.dtype))

        q, k, v = project(self.query), project(self.key), project(self.value)
        if c.qkv_bias:
            q, k, v = (
                y + b[...].astype(y.dtype)[None, None]
                for y, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias))
            )
        if c.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, tables), rotate(k, tables)
        out_BLHE, cache = context.attention(q, k, v, cache, layer)
        return jnp.einsum("blhe,hed->bld", out_BLHE, self.out[...].astype(x_BLD.dtype)), cache


class SwiGLU(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, std = config, config.width**-0.5
        self.gate = parameter(rngs, (c.width, c.ffn), ("embed", "ffn"), c, std)
        self.up = parameter(rngs, (c.width, c.ffn), ("embed", "ffn"), c, std)
        self.down = parameter(rngs, (c.ffn, c.width), ("ffn", "embed"), c, c.ffn**-0.5 / math.sqrt(2 * c.depth))

    def __call__(self, x):
        dtype = x.dtype
        hidden = jax.nn.silu(x @ self.gate[...].astype(dtype)) * (x @ self.up[...].astype(dtype))
        return hidden @ self.down[...].astype(dtype)


class Layer(nnx.Module):
    """A pre-norm residual layer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm(config.width, config, rngs)
        self.mixer = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width, config, rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x, tables, context, cache, layer):
        with jax.named_scope("mixer"):
            y, cache = self.mixer(self.mixer_norm(x), tables, context, cache, layer)
        x = x + y
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), cache
