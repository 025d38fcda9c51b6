"""The Gated DeltaNet token mixer of Qwen3.5.

Shapes: B rows, L tokens, D width, K key heads, H value heads, E and V sizes of a key and a value, W convolution taps.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.delta import l2_normalised
from cipo_jax.models.layers import dense, normalised, parameter, trailing


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DeltaInputs:
    """What a delta layer asks its context to mix.

    Attributes:
      streams: queries `[B, L, K, E]`, keys `[B, L, K, E]` and values `[B, L, H, V]` before the convolution.
      kernels: their taps `[W, K, E]`, `[W, K, E]`, `[W, H, V]`; the last tap meets the token itself.
      log_decay: `[B, L, H]` float32.
      beta: `[B, L, H]` float32.
    """

    streams: tuple[jax.Array, jax.Array, jax.Array]
    kernels: tuple[jax.Array, jax.Array, jax.Array]
    log_decay: jax.Array
    beta: jax.Array

    def convolved(self, taps):
        """Queries, keys and values for the delta rule.

        Args:
          taps: for each stream the list of its values 0, 1, .., W - 1 tokens back, zeros where there was none.
        """
        mixed = []
        for kernel, tap in zip(self.kernels, taps, strict=True):
            wide = jnp.promote_types(kernel.dtype, jnp.float32)
            total = sum(trailing(kernel[-1 - back], x, wide) * x.astype(wide) for back, x in enumerate(tap))
            mixed.append(jax.nn.silu(total).astype(tap[0].dtype))
        q, k, v = mixed
        return l2_normalised(q) * q.shape[-1] ** -0.5, l2_normalised(k), v

    def silenced(self, real_BL) -> "DeltaInputs":
        """The same with padding neither decaying the state nor writing to it."""
        keep = real_BL[..., None]
        return dataclasses.replace(
            self, log_decay=jnp.where(keep, self.log_decay, 0.0), beta=jnp.where(keep, self.beta, 0.0)
        )


def _log_uniform(key, shape):
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))


class GatedDelta(nnx.Module):
    """Gated DeltaNet; which tokens feed the convolution and the state is decided by the context.

    Queries, keys and values are separate parameters although checkpoints fuse them: split over devices, the fused tensor
    has to be permuted before it can be taken apart.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c, std = config, config.width**-0.5
        K, H, E, V = c.delta_key_heads, c.delta_value_heads, c.delta_key_dim, c.delta_value_dim
        axes, taps, tap_axes = ("embed", "heads", "head_dim"), c.delta_conv, (None, "heads", "head_dim")
        self.eps = c.norm_eps
        self.query = parameter(rngs, (c.width, K, E), axes, c, std)
        self.key = parameter(rngs, (c.width, K, E), axes, c, std)
        self.value = parameter(rngs, (c.width, H, V), axes, c, std)
        self.gate = parameter(rngs, (c.width, H, V), axes, c, std)
        self.decay = parameter(rngs, (c.width, H), ("embed", "heads"), c, std)
        self.beta = parameter(rngs, (c.width, H), ("embed", "heads"), c, std)
        self.query_conv = parameter(rngs, (taps, K, E), tap_axes, c, taps**-0.5)
        self.key_conv = parameter(rngs, (taps, K, E), tap_axes, c, taps**-0.5)
        self.value_conv = parameter(rngs, (taps, H, V), tap_axes, c, taps**-0.5)
        # The decay is an exponential of an exponential: float32 whatever the rest of the model is kept in.
        self.A_log = parameter(rngs, (H,), ("heads",), c, _log_uniform, dtype="float32")
        self.dt_bias = parameter(rngs, (H,), ("heads",), c, dtype="float32")
        self.norm = parameter(rngs, (V,), ("norm",), c, dtype="float32")
        out_std = (H * V) ** -0.5 / math.sqrt(2 * c.depth)
        self.out = parameter(rngs, (H, V, c.width), ("heads", "head_dim", "embed"), c, out_std)

    def __call__(self, x_BLD, tables, context, cache, layer):
        del tables
        dtype = x_BLD.dtype
        step, beta = (x_BLD @ w[...].astype(dtype) for w in (self.decay, self.beta))
        step = step.astype(jnp.promote_types(dtype, jnp.float32))
        rate = jnp.exp(trailing(self.A_log[...], step))
        inputs = DeltaInputs(
            (dense(x_BLD, self.query), dense(x_BLD, self.key), dense(x_BLD, self.value)),
            (self.query_conv[...], self.key_conv[...], self.value_conv[...]),
            -rate * jax.nn.softplus(step + trailing(self.dt_bias[...], step)),
            jax.nn.sigmoid(beta.astype(step.dtype)),
        )
        out_BLHV, cache = context.delta(inputs, cache, layer)
        gate = jax.nn.silu(dense(x_BLD, self.gate).astype(step.dtype))
        out = normalised(out_BLHV, self.eps)  # this norm is plain, not zero-centred
        out = (out * trailing(self.norm[...], out) * gate).astype(dtype)
        return dense(out, self.out, inputs=2), cache
