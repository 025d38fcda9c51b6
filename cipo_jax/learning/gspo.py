"""GSPO (arXiv 2507.18071): the ratio of a whole sequence, clipped per sequence."""

import dataclasses

import gin
import jax
import jax.numpy as jnp

from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.objective import ClippedObjective, token_log_ratio
from cipo_jax.types import Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class GspoObjective(ClippedObjective):
    """The clipped objective on `s_i = exp(mean_t (logprob - old_logprob))`, in GSPO's token form.

    `log s_t = logprob - sg(logprob) + sg(log s_i)`: the value is the sequence's ratio, the gradient is the token's own,
    so advantages may differ between turns (GSPO-token). Tokens are the action tokens of all turns. Defaults follow
    verl: `log s` capped at 10, clip 3e-4 / 4e-4, mean over rows of token means.

    Attributes: as in `ClippedObjective`.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: str = "seq_mean_token_mean"

    def log_ratio(self, logprob_NL: Array, batch: UpdateBatch) -> Array:
        """`[N, L]` float32, the sequence's log-ratio on each of its tokens in the loss, else 0."""
        mask = batch.action_mask
        tokens_N1 = jnp.maximum(mask.sum(-1, keepdims=True, dtype=jnp.float32), 1.0)
        sequence_N1 = token_log_ratio(jax.lax.stop_gradient(logprob_NL), batch).sum(-1, keepdims=True) / tokens_N1
        logprob = jnp.where(mask, logprob_NL, 0.0)
        log_s = logprob - jax.lax.stop_gradient(logprob) + sequence_N1
        return jnp.where(mask, jnp.minimum(log_s, 10.0), 0.0)
