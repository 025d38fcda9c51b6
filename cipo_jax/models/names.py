"""The table between Hugging Face tensors and this decoder's parameters, for both directions.

A checkpoint's tensor is one parameter's slice of one layer, or several fused. Each entry gives, for every parameter inside
it, a *view*: a function of the tensor's numpy array that selects, reshapes and transposes without copying. Reading
evaluates the view; writing assigns to it. So one definition serves both, and they cannot disagree.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from cipo_jax.models.config import ATTENTION, DecoderConfig

Path = tuple[str | int, ...]
View = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter inside a tensor.

    Attributes:
      path: of the parameter in the decoder's state.
      period: index along the parameter's leading, stacked axis; None where there is none.
      view: selects the parameter's slice from the tensor.
    """

    path: Path
    period: int | None
    view: View


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its canonical name, its shape, and the parameters inside."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of `config`, in the order of the forward pass."""
    c = config
    yield Tensor("model.embed_tokens.weight", (c.vocab_size, c.width), (_whole("embedding"),))
    for layer in range(c.depth):
        period, slot = divmod(layer, len(c.period))
        mixer = _attention(c) if c.period[slot] == ATTENTION else _delta(c)
        for suffix, shape, parts in (*mixer, *_rest(c)):
            yield Tensor(
                f"model.layers.{layer}.{suffix}.weight"
                if not suffix.endswith(_BARE)
                else f"model.layers.{layer}.{suffix}",
                shape,
                tuple(Part(("layers", slot, *path), period, view) for path, view in parts),
            )
    yield Tensor("model.norm.weight", (c.width,), (_whole("norm", "scale"),))
    if not c.tied:
        yield Tensor("lm_head.weight", (c.vocab_size, c.width), (_whole("head"),))


_BARE = (".bias", ".A_log", ".dt_bias")  # suffixes that are whole names


def _same(w):
    return w


def _transposed(w):
    return w.T


def _whole(*path) -> Part:
    return Part(path, None, _same)


def _heads_out(heads: int, size: int, rows: slice = slice(None)) -> View:
    """`[heads x size (of rows), D]` as `[D, heads, size]`."""
    return lambda w: w[rows].reshape(heads, size, w.shape[-1]).transpose(2, 0, 1)


def _heads_in(heads: int, size: int) -> View:
    """`[D, heads x size]` as `[heads, size, D]`."""
    return lambda w: w.reshape(w.shape[0], heads, size).transpose(1, 2, 0)


def _taps(heads: int, size: int, rows: slice) -> View:
    """`[heads x size (of rows), 1, W]` as `[W, heads, size]`."""
    return lambda w: w[rows, 0].reshape(heads, size, w.shape[-1]).transpose(2, 0, 1)


def _attention(c: DecoderConfig):
    D, H, K, E = c.width, c.heads, c.kv_heads, c.head_dim
    if c.gated:  # per head: query, then gate
        parts = [
            (("mixer", name), lambda w, i=i: w.reshape(H, 2, E, D)[:, i].transpose(2, 0, 1))
            for i, name in enumerate(("query", "gate"))
        ]
        yield "self_attn.q_proj", (2 * H * E, D), parts
    else:
        yield "self_attn.q_proj", (H * E, D), [(("mixer", "query"), _heads_out(H, E))]
    yield "self_attn.k_proj", (K * E, D), [(("mixer", "key"), _heads_out(K, E))]
    yield "self_attn.v_proj", (K * E, D), [(("mixer", "value"), _heads_out(K, E))]
    yield "self_attn.o_proj", (D, H * E), [(("mixer", "out"), _heads_in(H, E))]
    if c.qkv_bias:
        for short, name, heads in (("q", "query", H), ("k", "key", K), ("v", "value", K)):
            view = lambda w, heads=heads: w.reshape(heads, E)  # noqa: E731
            yield f"self_attn.{short}_proj.bias", (heads * E,), [(("mixer", f"{name}_bias"), view)]
    if c.qk_norm:
        yield "self_attn.q_norm", (E,), [(("mixer", "query_norm", "scale"), _same)]
        yield "self_attn.k_norm", (E,), [(("mixer", "key_norm", "scale"), _same)]


def _delta(c: DecoderConfig):
    D, K, H, E, V = c.width, c.delta_key_heads, c.delta_value_heads, c.delta_key_dim, c.delta_value_dim
    fused = [
        ("query", K, E, slice(0, K * E)),
        ("key", K, E, slice(K * E, 2 * K * E)),
        ("value", H, V, slice(2 * K * E, None)),
    ]
    channels = 2 * K * E + H * V
    yield (
        "linear_attn.in_proj_qkv",
        (channels, D),
        [(("mixer", name), _heads_out(heads, size, rows)) for name, heads, size, rows in fused],
    )
    yield (
        "linear_attn.conv1d",
        (channels, 1, c.delta_conv),
        [(("mixer", f"{name}_conv"), _taps(heads, size, rows)) for name, heads, size, rows in fused],
    )
    yield "linear_attn.in_proj_z", (H * V, D), [(("mixer", "gate"), _heads_out(H, V))]
    yield "linear_attn.in_proj_b", (H, D), [(("mixer", "beta"), _transposed)]
    yield "linear_attn.in_proj_a", (H, D), [(("mixer", "decay"), _transposed)]
    yield "linear_attn.A_log", (H,), [(("mixer", "A_log"), _same)]
    yield "linear_attn.dt_bias", (H,), [(("mixer", "dt_bias"), _same)]
    yield "linear_attn.norm", (V,), [(("mixer", "norm"), _same)]
    yield "linear_attn.out_proj", (D, H * V), [(("mixer", "out"), _heads_in(H, V))]


def _rest(c: DecoderConfig):
    yield "input_layernorm", (c.width,), [(("mixer_norm", "scale"), _same)]
    yield "post_attention_layernorm", (c.width,), [(("mlp_norm", "scale"), _same)]
    yield "mlp.gate_proj", (c.ffn, c.width), [(("mlp", "gate"), _transposed)]
    yield "mlp.up_proj", (c.ffn, c.width), [(("mlp", "up"), _transposed)]
    yield "mlp.down_proj", (c.width, c.ffn), [(("mlp", "down"), _transposed)]
