"""UpdateBatch: the arrays an objective reads, in lockstep per token."""

import dataclasses
from typing import Any

import jax
import numpy as np

from cipo_jax.learning.advantages import zero_advantage_rows
from cipo_jax.types import Array, StopReason, Trajectories


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class UpdateBatch:
    """Rows of an update. Leading axes are `[N]`, or `[M, N / M]` once split into microbatches.

    Attributes:
      tokens: `[N, L]` int32.
      action_mask: `[N, L]` bool, tokens in the loss: sampled tokens, less the rows that are skipped.
      turn: `[N, L]` int8.
      length: `[N]` int32, tokens before padding; 0 for an empty row.
      group: `[N]` int32; -1 for an empty row.
      advantage: `[N, L]` float32, 0 off action tokens.
      old_logprob: `[N, L]` float32, log-probs under the policy that sampled; None: the policy of this update itself
        (on-policy, ratio 1).
      ref_logprob: `[N, L]` float32, log-probs under the reference; None when no KL is wanted.
      importance: `[N, L]` float32, factor on the policy-gradient term (see `truncated_importance`); None for 1.
    """

    tokens: Any
    action_mask: Any
    turn: Any
    length: Any
    group: Any
    advantage: Any
    old_logprob: Any = None
    ref_logprob: Any = None
    importance: Any = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def map(self, fn) -> "UpdateBatch":
        """Applies `fn` to every array that is present."""
        return jax.tree.map(fn, self)


def update_batch(
    trajectories: Trajectories,
    advantage_BL: Array,
    old_logprob: Array | None = None,
    ref_logprob: Array | None = None,
    importance: Array | None = None,
    *,
    skip_zero_groups: bool = True,
    mask_overlong: bool = False,
) -> UpdateBatch:
    """Builds the rows of an update from trajectories (host arrays).

    Args:
      trajectories: the batch.
      advantage_BL: `[B, L]` float32.
      old_logprob: `[B, L]` float32 or None.
      ref_logprob: `[B, L]` float32 or None.
      importance: `[B, L]` float32 or None.
      skip_zero_groups: see `AdvantageConfig`.
      mask_overlong: leave trajectories that hit the token limit out of the loss (DAPO's overlong filtering). Their
        rewards still count in the group's mean and std.

    Returns:
      `B` rows; skipped ones have an empty `action_mask`.
    """
    mask = np.asarray(trajectories.action_mask)
    if skip_zero_groups:
        mask = mask & ~zero_advantage_rows(advantage_BL, trajectories.group)[:, None]
    if mask_overlong:
        mask = mask & (np.asarray(trajectories.stop_reason) != StopReason.TOKEN_LIMIT)[:, None]
    return UpdateBatch(
        tokens=trajectories.tokens,
        action_mask=mask,
        turn=trajectories.turn,
        length=trajectories.length,
        group=trajectories.group,
        advantage=np.asarray(advantage_BL, np.float32),
        old_logprob=old_logprob,
        ref_logprob=ref_logprob,
        importance=importance,
    )


def truncated_importance(old_logprob: Array, behaviour_logprob: Array, action_mask: Array, cap: float) -> np.ndarray:
    """Truncated importance weights between the trainer's and the sampler's probabilities of the same weights.

    Args:
      old_logprob: `[B, L]` float32, recomputed by the scorer.
      behaviour_logprob: `[B, L]` float32, recorded by the sampler.
      action_mask: `[B, L]` bool.
      cap: largest weight.

    Returns:
      `[B, L]` float32, `min(exp(old - behaviour), cap)`; 1 off action tokens.
    """
    gap = np.where(np.asarray(action_mask), np.asarray(old_logprob) - np.asarray(behaviour_logprob), 0.0)
    return np.minimum(np.exp(np.minimum(gap, 80.0)), cap).astype(np.float32)
