"""Log-probs of trajectories, seen and counterfactual, in one forward."""

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.scoring.logprobs import token_logprobs
from cipo_jax.scoring.packing import CopyStream


def shifted(x_BL):
    """Moves values read at row `j - 1` to the token `j` they belong to; token 0 gets 0."""
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)))


class Scorer:
    """Scores tokens under a policy given by its graph definition.

    Args:
      graph: the decoder's graph definition.
      block: side of an attention tile.
    """

    def __init__(self, graph: nnx.GraphDef, block: int = 256):
        self.graph, self.block = graph, block

    def __call__(self, params, tokens_BL, length_B, active_BL, temperature=1.0, copies: CopyStream | None = None):
        """Scores the visible trajectories, and `copies` of their tokens in the same pass.

        Args:
          params: the decoder's parameters.
          tokens_BL: int32 ids; `length_B` of them are real.
          active_BL: bool, tokens whose log-prob is wanted.
          temperature: logits are divided by it.
          copies: the counterfactual stream, or None.

        Returns:
          `(logprob_BL, entropy_BL)` float32, at the token they belong to and 0 where not active; with `copies`, a third
          value `[B, L]`: the counterfactual log-prob of every token that one of the copies targets, and the visible one of
          every other, so that their difference is exactly 0 where nothing was hidden.
        """
        B, L = tokens_BL.shape
        positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L))
        visibility = Visibility.causal(positions < length_B[:, None])
        tokens, target = tokens_BL, jnp.pad(tokens_BL[:, 1:], ((0, 0), (0, 1)))
        active = jnp.pad(active_BL[:, 1:], ((0, 0), (0, 1)))
        if copies is not None:
            place = jnp.maximum(copies.target, 0)
            tokens = jnp.concatenate([tokens, copies.token], 1)
            positions = jnp.concatenate([positions, copies.position], 1)
            target = jnp.concatenate([target, jnp.take_along_axis(tokens_BL, place, 1)], 1)
            active = jnp.concatenate([active, copies.target >= 0], 1)
            visibility = visibility.concatenate(copies.visibility)
        model = nnx.merge(self.graph, params)
        hidden, _ = model(tokens, positions, PackedContext(visibility, self.block))
        logprob, entropy = token_logprobs(hidden, model.unembedding, target, active, temperature)
        visible = shifted(logprob[:, :L]), shifted(entropy[:, :L])
        if copies is None:
            return visible
        row = jnp.arange(B)[:, None]
        wanted = jnp.where(copies.target >= 0, copies.target, L)
        return *visible, visible[0].at[row, wanted].set(logprob[:, L:], mode="drop")


def jit_scorer(scorer: Scorer, sharding=None):
    """`scorer` compiled, its results split like the batch."""
    return jax.jit(scorer.__call__, out_shardings=sharding)
