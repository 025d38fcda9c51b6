"""Log-probs of trajectories, seen and counterfactual, in one forward."""

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

    def __call__(
        self,
        params,
        tokens_BL,
        length_B,
        active_BL,
        temperature=1.0,
        copies: CopyStream | None = None,
        start_BL=None,
    ):
        """Scores the visible trajectories, and `copies` of their tokens in the same pass.

        Args:
          params: the decoder's parameters.
          tokens_BL: int32 ids; `length_B` of them are real.
          active_BL: bool, tokens whose log-prob is wanted.
          temperature: logits are divided by it.
          copies: the counterfactual stream, or None.
          start_BL: int32, the first place of each token's document where rows hold several; None for one a row.

        Returns:
          `(logprob_BL, entropy_BL)` float32, at the token they belong to and 0 where not active; with `copies` `[B, C]`, a
          third value `[B, C]`: the log-prob of each place's target, 0 where it has none.
        """
        B, L = tokens_BL.shape
        index = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L))
        visibility = Visibility.causal(index < length_B[:, None], start_BL)
        positions = index if start_BL is None else index - start_BL
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
        hidden, _ = model(tokens, positions, PackedContext(visibility, self.block, L))
        logprob, entropy = token_logprobs(hidden, model.unembedding, target, active, temperature)
        visible = shifted(logprob[:, :L]), shifted(entropy[:, :L])
        return visible if copies is None else (*visible, logprob[:, L:])
