"""Generalised advantage estimation (arXiv 1506.02438) over action tokens, and PPO's value loss.

Observation tokens are not steps of the policy: they are passed over, and neither their values nor anything else about
them reaches an advantage, a whitening statistic or the value loss (Search-R1's code runs through them).
"""

import jax
import jax.numpy as jnp

from cipo_jax.learning.objective import masked_pair
from cipo_jax.types import Array


def gae(
    reward_BL: Array, value_BL: Array, action_mask_BL: Array, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Array, Array]:
    """Advantages and returns of action tokens, as if the other tokens were cut out of the row.

    `A_j = delta_j + gamma lam A_next(j)`, `delta_j = r_j + gamma V_next(j) - V_j`, where `next(j)` is the next action
    token; behind the last one both are 0.

    Args:
      reward_BL: `[B, L]` float32. A reward off action tokens is credited to the last action token before it.
      value_BL: `[B, L]` float32, the value head's estimate before token `j` is sampled; ignored off action tokens.
      action_mask_BL: `[B, L]` bool.
      gamma: discount per action token.
      lam: GAE's lambda.

    Returns:
      `[B, L]` float32 advantages and `[B, L]` float32 returns (advantage + value), 0 off action tokens.
    """
    mask = jnp.asarray(action_mask_BL, bool)
    value_BL = jnp.where(mask, value_BL, 0.0)

    def step(carry, column):
        next_advantage, next_value, pending = carry
        reward, value, acts = column
        reward = reward + pending
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (
            jnp.where(acts, advantage, next_advantage),
            jnp.where(acts, value, next_value),
            jnp.where(acts, 0.0, reward),
        )
        return carry, jnp.where(acts, advantage, 0.0)

    zeros = jnp.zeros(mask.shape[0], jnp.float32)
    columns = (jnp.asarray(reward_BL, jnp.float32).T, value_BL.astype(jnp.float32).T, mask.T)
    _, advantage_LB = jax.lax.scan(step, (zeros, zeros, zeros), columns, reverse=True)
    advantage_BL = advantage_LB.T
    return advantage_BL, jnp.where(mask, advantage_BL + value_BL, 0.0)


def whiten(x_BL: Array, mask_BL: Array, floor: float = 1e-8) -> Array:
    """`(x - mean) / sqrt(var + floor)` over the mask, population variance; 0 off it."""
    total, count = masked_pair(x_BL, mask_BL)
    mean = total / jnp.maximum(count, 1.0)
    square, _ = masked_pair(jnp.square(x_BL - mean), mask_BL)
    scale = jax.lax.rsqrt(square / jnp.maximum(count, 1.0) + floor)
    return jnp.where(mask_BL, (x_BL - mean) * scale, 0.0)


def token_rewards(
    outcome_B: Array,
    action_mask_BL: Array,
    logprob_BL: Array | None = None,
    ref_logprob_BL: Array | None = None,
    kl_weight: float = 0.0,
) -> Array:
    """`[B, L]` float32, the outcome on each row's last action token less `kl_weight * k1` on every action token.

    This is PPO with KL in the reward (Search-R1: 1e-3). A row without an action token gets 0.
    """
    mask = jnp.asarray(action_mask_BL, bool)
    is_last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    reward = jnp.where(is_last, jnp.asarray(outcome_B, jnp.float32)[:, None], 0.0)
    if kl_weight:
        reward = reward - jnp.where(mask, kl_weight * (logprob_BL - ref_logprob_BL), 0.0)
    return reward


def value_loss(
    value_BL: Array, old_value_BL: Array, return_BL: Array, mask_BL: Array, clip: float = 0.5
) -> tuple[Array, Array]:
    """(sum, count) of PPO's clipped value loss, `max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2`, on the mask."""
    bounded = jnp.clip(value_BL, old_value_BL - clip, old_value_BL + clip)
    worst = jnp.maximum(jnp.square(value_BL - return_BL), jnp.square(bounded - return_BL))
    return masked_pair(0.5 * worst, mask_BL)
