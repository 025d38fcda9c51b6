"""What a decoder is made of."""

import dataclasses

import gin
import jax.numpy as jnp

from cipo_jax.errors import UserError

ATTENTION, DELTA = "attention", "delta"  # kinds of token mixers
DELTA_CHUNK = 64  # tokens that the delta rule takes at once


@gin.configurable
@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and variant of a decoder. The defaults are Qwen3's; see `configs/models` for the published shapes.

    Attributes:
      vocab_size: rows of the embedding.
      width: size of the residual stream.
      depth: number of layers, a multiple of the length of `period`.
      heads: query heads.
      kv_heads: key-value heads; divides `heads`.
      head_dim: size of one head; `heads * head_dim` need not be `width`.
      ffn: inner size of the SwiGLU.
      tied: the output projection is the embedding.
      qkv_bias: biases on the query, key and value projections (Qwen2.5).
      qk_norm: RMSNorm over `head_dim` on queries and keys before RoPE (Qwen3, Qwen3.5).
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      dtype: of activations and of parameters in use ("float32" on CPU, where bf16 matmuls are slow).
      param_dtype: of stored parameters.
      remat: what the backward pass recomputes. True or "full": everything but each layer's input; "dots": everything
        but the outputs of the projections; False or "none": nothing.
      period: kinds of the layers that repeat along the depth, each "attention" or "delta" (Gated DeltaNet).
      rotary: the fraction of `head_dim` that RoPE turns, from its start (Qwen3.5: 0.25).
      rope_llama3: `(factor, low_freq_factor, high_freq_factor, original_max_position_embeddings)` of Llama 3's
        frequency scaling, or None.
      gated: the attention's output is multiplied by the sigmoid of a projection of the layer's input (Qwen3.5).
      zero_centred: norms multiply by `1 + w` (Qwen3.5, but for the delta rule's output norm).
      delta_key_heads: query and key heads of the delta rule.
      delta_value_heads: its value heads, a multiple of `delta_key_heads`.
      delta_key_dim, delta_value_dim: sizes of one such head.
      delta_conv: taps of the causal convolution in front of the delta rule.
    """

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool | str = True
    period: tuple[str, ...] = (ATTENTION,)
    rotary: float = 1.0
    rope_llama3: tuple[float, float, float, int] | None = None
    gated: bool = False
    zero_centred: bool = False
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_conv: int = 4

    def __post_init__(self):
        object.__setattr__(self, "period", tuple(self.period))  # gin gives lists; the config must be hashable
        if self.rope_llama3 is not None:
            object.__setattr__(self, "rope_llama3", tuple(self.rope_llama3))
        unknown = set(self.period) - {ATTENTION, DELTA}
        if unknown or not self.period:
            raise UserError(f"DecoderConfig.period={self.period} must hold {ATTENTION!r} and {DELTA!r} alone.")
        if self.depth % len(self.period):
            raise UserError(
                f"DecoderConfig.depth={self.depth} must be a multiple of the {len(self.period)} layers of its period."
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"DecoderConfig.heads={self.heads} must be a multiple of kv_heads={self.kv_heads}; change one of them."
            )
        if self.rotary_dim % 2:
            raise UserError(
                f"DecoderConfig.rotary={self.rotary} of head_dim={self.head_dim} turns {self.rotary_dim} components; "
                "choose an even number."
            )
        if self.remat_policy not in ("full", "dots", "none"):
            raise UserError(f"DecoderConfig.remat={self.remat!r} is unknown; choose 'full', 'dots' or 'none'.")
        if DELTA in self.period:
            if min(self.delta_key_heads, self.delta_value_heads, self.delta_key_dim, self.delta_value_dim) < 1:
                raise UserError(
                    "DecoderConfig with 'delta' layers needs delta_key_heads, delta_value_heads, delta_key_dim and "
                    "delta_value_dim; set all four."
                )
            if self.delta_value_heads % self.delta_key_heads:
                raise UserError(
                    f"DecoderConfig.delta_value_heads={self.delta_value_heads} must be a multiple of "
                    f"delta_key_heads={self.delta_key_heads}."
                )

    @property
    def compute_dtype(self):
        return jnp.dtype(self.dtype)

    @property
    def remat_policy(self) -> str:
        """`remat` as one of "full", "dots", "none"."""
        return {True: "full", False: "none"}.get(self.remat, self.remat)

    @property
    def rotary_dim(self) -> int:
        """Components of a head that RoPE turns."""
        return int(self.head_dim * self.rotary)

    @property
    def periods(self) -> int:
        """Number of repetitions of `period` along the depth."""
        return self.depth // len(self.period)

    @property
    def attention_layers(self) -> int:
        """Number of layers that hold keys and values."""
        return self.periods * self.period.count(ATTENTION)

    @property
    def delta_layers(self) -> int:
        """Number of layers that hold a recurrent state."""
        return self.periods * self.period.count(DELTA)

    @property
    def copy_alignment(self) -> int:
        """A copy in a packed row must start at a multiple of this many places behind the trajectory."""
        return DELTA_CHUNK if DELTA in self.period else 1
