"""Aggregation: which weight a token has in the loss, as (sum, count) pairs that add up exactly over row subsets.

Every option is linear in the tokens' losses, so `sum(weight * loss)` and `count` of microbatches, shards and hosts add
up, and one division at the end gives the loss of the whole minibatch.
"""

import jax.numpy as jnp

from cipo_jax.errors import UserError
from cipo_jax.types import Array

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def check_aggregation(aggregation: str, token_norm: float | None) -> None:
    """Raises UserError for an unknown aggregation, or one that lacks its constant."""
    if aggregation not in AGGREGATIONS:
        raise UserError(f"aggregation={aggregation!r} is not an option; use one of {', '.join(AGGREGATIONS)}")
    if aggregation == "seq_mean_token_sum_norm" and not (token_norm and token_norm > 0):
        raise UserError(
            f"token_norm={token_norm} must be positive for seq_mean_token_sum_norm; use the largest number of action "
            "tokens a trajectory may have"
        )


def token_weights(mask_NL: Array, aggregation: str, token_norm: float | None = None) -> tuple[Array, Array]:
    """Weights of tokens in the loss and the denominator they share.

    Args:
      mask_NL: `[N, L]` bool, tokens in the loss.
      aggregation: `"token_mean"`: all tokens count alike (DAPO, verl's default). `"seq_mean_token_sum"`: mean over rows
        of sums. `"seq_mean_token_mean"`: mean over rows of means (GRPO as published). `"seq_mean_token_sum_norm"`: mean
        over rows of sums divided by the constant `token_norm` (Dr. GRPO).
      token_norm: the constant of the last option, in tokens.

    Returns:
      `[N, L]` float32 weights, 0 off the mask; float32 scalar count: tokens for `"token_mean"`, else rows with at least
      one token in the loss. Rows without one, such as padding and skipped groups, add to neither.
    """
    mask = mask_NL.astype(jnp.float32)
    tokens_N1 = mask.sum(-1, keepdims=True)
    rows = (tokens_N1 > 0).astype(jnp.float32).sum()
    if aggregation == "token_mean":
        return mask, mask.sum()
    if aggregation == "seq_mean_token_sum":
        return mask, rows
    if aggregation == "seq_mean_token_mean":
        return mask / jnp.maximum(tokens_N1, 1.0), rows
    check_aggregation(aggregation, token_norm)
    return mask / token_norm, rows
