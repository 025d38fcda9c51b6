"""What a decoder is made of."""

import dataclasses

import gin
import jax.numpy as jnp


@gin.configurable
@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and variant of a decoder. The defaults are Qwen3's; see `../configs/models` for the published shapes.

    Attributes:
      vocab_size: rows of the embedding.
      width: size of the residual stream.
      depth: number of layers.
      heads: query heads.
      kv_heads: key-value heads; divides `heads`.
      head_dim: size of one head; `heads * head_dim` need not be `width`.
      ffn: inner size of the SwiGLU.
      tied: the output projection is the embedding.
      qkv_bias: biases on the query, key and value projections (Qwen2.5).
      qk_norm: RMSNorm over `head_dim` on queries and keys before RoPE (Qwen3).
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      dtype: of activations and of parameters in use ("float32" on CPU, where bf16 matmuls are slow).
      param_dtype: of stored parameters.
      remat: keep only each layer's input for the backward pass and recompute the rest.
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
    remat: bool = True

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def compute_dtype(self):
        return jnp.dtype(self.dtype)
