"""The decoder: embedding, scanned layers, final norm. It turns tokens into hidden states, never into `[B, L, V]` logits.

How tokens see each other is not the model's business: a *context* object answers each layer's mixer.
`models/attention.py` has the one for whole sequences, `models/cache.py` the one for cached decoding.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import ATTENTION, DecoderConfig
from cipo_jax.models.delta_layer import DeltaInputs, GatedDelta
from cipo_jax.models.layers import Attention, Layer, RMSNorm, parameter, rope_tables

_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class Context(Protocol):
    """What a token sees."""

    def attention(self, q_BLHE, k_BLKE, v_BLKE, cache: Any, layer) -> tuple[jax.Array, Any]:
        """The attention output `[B, L, H, E]` of attention layer number `layer`, and the updated cache (None if none)."""

    def delta(self, inputs: DeltaInputs, cache: Any, layer) -> tuple[jax.Array, Any]:
        """The delta rule's output `[B, L, H, V]` of delta layer number `layer`, and the updated cache."""


class Decoder(nnx.Module):
    """A decoder-only transformer. The layers of one period are separate; each is stacked over the periods."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, rules: ShardingRules | None = None):
        c = self.config = config
        self.rules = rules
        self.embedding = parameter(rngs, (c.vocab_size, c.width), ("vocab", "embed"), c, c.width**-0.5)

        def stack(kind: str) -> Layer:
            mixer = Attention if kind == ATTENTION else GatedDelta
            keys = jax.random.split(rngs.params(), c.periods)
            return nnx.vmap(lambda key: Layer(c, nnx.Rngs(params=key), mixer))(keys)

        self.layers = nnx.List([stack(kind) for kind in c.period])
        self.norm = RMSNorm(c.width, c, rngs)
        if not c.tied:
            self.head = parameter(rngs, (c.vocab_size, c.width), ("vocab", "embed"), c, c.width**-0.5)

    def __call__(self, tokens_BL, positions_BL, context: Context, cache=None, unroll: bool | Sequence = False):
        """Hidden states `[B, L, D]` after the final norm, in the compute dtype, and the updated cache.

        Args:
          tokens_BL: int32 ids.
          positions_BL: int32 rotary positions.
          context: decides what each token sees.
          cache: a pytree the context reads and writes; carried through the layers.
          unroll: a Python loop over layers instead of a scan (faster decoding on CPU, longer compilation). Pass the result
            of `unstacked`, taken outside of a loop over steps, to spare slicing the weights in every step.
        """
        c = self.config
        x = self._residual(self.embedding[...][tokens_BL].astype(c.compute_dtype))
        tables = rope_tables(positions_BL, c)
        split = [nnx.split(layer) for layer in self.layers]
        # Attention and delta layers count apart: each kind has its own stack in the cache.
        ordinal = [c.period[:slot].count(kind) for slot, kind in enumerate(c.period)]
        each = [c.period.count(kind) for kind in c.period]

        def apply(slot, weights, carry, number):
            x, cache = carry
            x, cache = nnx.merge(split[slot][0], weights)(x, tables, context, cache, number)
            return self._residual(x), cache

        def body(carry, xs):
            weights, period = xs
            for slot in range(len(c.period)):
                layer = lambda w, carry, number, slot=slot: apply(slot, w, carry, number)  # noqa: E731
                if c.remat_policy != "none" and not unroll:
                    layer = jax.checkpoint(layer, prevent_cse=False, policy=_POLICIES[c.remat_policy])
                carry = layer(weights[slot], carry, period * each[slot] + ordinal[slot])
            return carry, None

        carry = (x, cache)
        if unroll:
            periods = self.unstacked() if unroll is True else unroll
            for period, weights in enumerate(periods):
                carry, _ = body(carry, (weights, period))
        else:
            stacked = [state for _, state in split]
            carry, _ = jax.lax.scan(body, carry, (stacked, jnp.arange(c.periods)))
        x, cache = carry
        return self.norm(x), cache

    def _residual(self, x_BLD):
        return x_BLD if self.rules is None else self.rules.constrain(x_BLD, ("batch", None, None))

    def unstacked(self) -> list:
        """The layers' weights as one pytree per period, for `unroll`."""
        states = [nnx.split(layer)[1] for layer in self.layers]
        return [jax.tree.map(lambda w, p=period: w[p], states) for period in range(self.config.periods)]

    @property
    def unembedding(self) -> jax.Array:
        """The output projection `[V, D]`."""
        return (self.embedding if self.config.tied else self.head)[...]

    def logits(self, hidden):
        """float32 logits `[..., V]` of hidden states; for few rows only (the last token of each slot)."""
        weight = self.unembedding.astype(hidden.dtype)
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        return jax.lax.dot_general(hidden, weight, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=wide)


def abstract_decoder(config: DecoderConfig, rules: ShardingRules | None = None) -> tuple[nnx.GraphDef, nnx.State]:
    """The graph definition and the `ShapeDtypeStruct`s of a decoder's parameters; nothing is allocated.

    With `rules` the graph knows its mesh and keeps activations split along the batch.
    """
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), rules)))


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
    graph, init = _init_program(config, rules)
    return graph, init(seed)


@functools.lru_cache(maxsize=8)
def _init_program(config: DecoderConfig, rules: ShardingRules):
    """The graph definition, and the program that makes parameters from a seed; compiled once per shape and mesh."""
    graph, shapes = abstract_decoder(config, rules)

    def init(seed):
        return nnx.split(Decoder(config, nnx.Rngs(jax.random.key(seed)), rules))[1]

    return graph, jax.jit(init, out_shardings=parameter_shardings(shapes, rules))


def cast(params: nnx.State, dtype) -> nnx.State:
    """`params` in `dtype`, but for those that must stay float32 (the delta rule's decay and output norm)."""

    def one(variable):
        value = variable.get_value()
        return variable if variable.get_metadata().get("fixed_dtype") else variable.replace(value.astype(dtype))

    return nnx.from_flat_state([(path, one(v)) for path, v in nnx.to_flat_state(params)])


def reshard(params: nnx.State, rules: ShardingRules, dtype=None) -> nnx.State:
    """A copy of `params` laid out by another table, in another dtype if given: from training to generation.

    The cast comes first, so a bf16 copy of float32 parameters moves half the bytes.
    """
    shardings = parameter_shardings(params, rules)

    def copy(params):
        return jax.tree.map(jnp.copy, params) if dtype is None else cast(params, dtype)

    return jax.jit(copy, out_shardings=shardings)(params)


def parameter_count(params) -> int:
    """The number of scalars in a pytree of arrays or shapes."""
    return sum(x.size for x in jax.tree.leaves(params))
