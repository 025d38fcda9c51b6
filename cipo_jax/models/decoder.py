"""The decoder: embedding, scanned layers, final norm. It turns tokens into hidden states, never into `[B, L, V]` logits.

How tokens see each other is not the model's business: a *context* object answers each layer's attention.
`models/attention.py` has the one for whole sequences, `rollout/cache.py` the one for cached decoding.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.layers import Layer, RMSNorm, parameter, rope_tables


class Context(Protocol):
    """What a token sees."""

    def attention(self, q_BLHE, k_BLKE, v_BLKE, cache: Any, layer) -> tuple[jax.Array, Any]:
        """The attention output `[B, L, H, E]` of layer number `layer`, and the updated cache (None if there is none)."""


class Decoder(nnx.Module):
    """A decoder-only transformer with its layers stacked along a leading axis."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = self.config = config
        self.embedding = parameter(rngs, (c.vocab_size, c.width), ("vocab", "embed"), c, c.width**-0.5)
        self.layers = nnx.vmap(lambda key: Layer(c, nnx.Rngs(params=key)))(jax.random.split(rngs.params(), c.depth))
        self.norm = RMSNorm(c.width, c, rngs)
        if not c.tied:
            self.head = parameter(rngs, (c.vocab_size, c.width), ("vocab", "embed"), c, c.width**-0.5)

    def __call__(self, tokens_BL, positions_BL, context: Context, cache=None, unroll: bool = False):
        """Hidden states `[B, L, D]` after the final norm, in the compute dtype, and the updated cache.

        Args:
          tokens_BL: int32 ids.
          positions_BL: int32 rotary positions.
          context: decides what each token sees.
          cache: a pytree the context reads and writes; carried through the layers.
          unroll: a Python loop over layers instead of a scan (faster decoding on CPU, longer compilation).
        """
        c = self.config
        x = self.embedding[...][tokens_BL].astype(c.compute_dtype)
        tables = rope_tables(positions_BL, c.head_dim, c.rope_theta)
        graph, stacked = nnx.split(self.layers)

        def body(carry, xs):
            weights, layer = xs
            x, cache = carry
            return nnx.merge(graph, weights)(x, tables, context, cache, layer), None

        if unroll:
            carry = (x, cache)
            for layer in range(c.depth):
                carry, _ = body(carry, (jax.tree.map(lambda w: w[layer], stacked), layer))  # noqa: B023
        else:
            if c.remat:
                body = jax.checkpoint(body, prevent_cse=False)
            carry, _ = jax.lax.scan(body, (x, cache), (stacked, jnp.arange(c.depth)))
        x, cache = carry
        return self.norm(x), cache

    @property
    def unembedding(self) -> jax.Array:
        """The output projection `[V, D]`."""
        return (self.embedding if self.config.tied else self.head)[...]

    def logits(self, hidden):
        """float32 logits `[..., V]` of hidden states; for few rows only (the last token of each slot)."""
        weight = self.unembedding.astype(hidden.dtype)
        return jax.lax.dot_general(
            hidden, weight, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )


def abstract_decoder(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The graph definition and the `ShapeDtypeStruct`s of a decoder's parameters; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))


def parameter_shardings(params: nnx.State, rules: ShardingRules) -> nnx.State:
    """The `NamedSharding` of every parameter in `params` (arrays or shapes), by its logical axes."""

    def one(path, variable):
        axes, shape = variable.get_metadata()["logical"], variable.get_value().shape
        if len(shape) == len(axes) + 1:  # stacked along depth
            axes = ("layers", *axes)
        return variable.replace(rules.sharding(axes, shape, ".".join(map(str, path))))

    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, one(path, v)) for path, v in flat])


def init_decoder(config: DecoderConfig, seed: int, rules: ShardingRules) -> tuple[nnx.GraphDef, nnx.State]:
    """Random parameters, created sharded: no device ever holds them whole."""
    graph, shapes = abstract_decoder(config)
    shardings = parameter_shardings(shapes, rules)
    init = jax.jit(lambda: nnx.split(Decoder(config, nnx.Rngs(seed)))[1], out_shardings=shardings)
    return graph, init()


def parameter_count(params) -> int:
    """The number of scalars in a pytree of arrays or shapes."""
    return sum(x.size for x in jax.tree.leaves(params))
