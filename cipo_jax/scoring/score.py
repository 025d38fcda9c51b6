"""Log-probs of trajectories, seen and counterfactual, in one forward."""

import jax
import jax.numpy as jnp
from flax import nnx

from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.scoring.logprobs import token_logprobs
from cipo_jax.scoring.packing import TILE, CopyStream


def shifted(x_BL):
    """Moves values read at row `j - 1` to the token `j` they belong to; token 0 gets 0."""
    return jnp.pad(x_BL[:, :-1], ((0, 0), (1, 0)))


def tile_side(model) -> int:
    """Side of an attention tile on a decoder's devices: a small one skips more, a large one fills a matrix unit."""
    devices = jax.devices() if model.rules is None else model.rules.mesh.devices.flat
    return TILE if devices[0].platform == "cpu" else 256


class Scorer:
    """Scores tokens under a policy given by its graph definition.

    Args:
      graph: the decoder's graph definition.
      block: side of an attention tile; None for what suits the device.
    """

    def __init__(self, graph: nnx.GraphDef, block: int | None = None):
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
        target, active = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (tokens_BL, active_BL))
        tokens = tokens_BL
        if copies is not None:
            tokens = jnp.concatenate([tokens, copies.token], 1)
            positions = jnp.concatenate([positions, copies.position], 1)
            visibility = visibility.concatenate(copies.visibility)
        model = nnx.merge(self.graph, params)
        hidden, _ = model(tokens, positions, PackedContext(visibility, self.block or tile_side(model), L))
        logprob, entropy = token_logprobs(hidden[:, :L], model.unembedding, target, active, temperature, model.rules)
        visible = shifted(logprob), shifted(entropy)
        if copies is None:
            return visible
        target = jnp.take_along_axis(tokens_BL, jnp.maximum(copies.target, 0), 1)
        wanted = copies.target >= 0
        copied, _ = token_logprobs(hidden[:, L:], model.unembedding, target, wanted, temperature, model.rules)
        return *visible, copied
