"""Advantages: turn rewards, normalised within groups and summed over later turns, on every action token.

Host numpy on whole batches: a group must be complete in the arrays that are passed.
"""

import dataclasses

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.learning.groups import standardise
from cipo_jax.types import Array, Trajectories, TurnRewards


@gin.configurable
@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages (arXiv 2608.06128, Eq. 9 and around; floors and norms are our choice).

    Attributes:
      gamma: discount per turn of `A_k = sum_{t >= k} gamma^(t - k) r_t`.
      ealr_norm: set of turn rewards that share a mean and std. `"group_turn"`: one group and turn index; `"group"`: one
        group, all turns (the literal reading; biased between turns); fewer than two valid values give 0. `"joint"`: one
        group, all turns and the outcomes together (IGPO), with `outcome_std_floor`.
      ealr_std_floor: nats per token, added to the std of turn rewards.
      outcome_std_floor: added to the std of outcomes.
      std_normalise: False subtracts the mean only (Dr. GRPO).
      leave_one_out: the baseline is the mean of the others (RLOO).
      unbiased_std: std with `n - 1` (Search-R1, verl).
      outcome_weight: factor on the normalised outcome; 0 is the ablation with EALR only.
      ealr_weight: factor on normalised turn rewards; 0 is GRPO.
      skip_zero_groups: rows of a group whose token advantages are all 0 leave the loss: neither their KL nor their
        tokens in the denominator count. False keeps both, as verl does.
    """

    gamma: float = 1.0
    ealr_norm: str = "group_turn"
    ealr_std_floor: float = 0.1
    outcome_std_floor: float = 1e-6
    std_normalise: bool = True
    leave_one_out: bool = False
    unbiased_std: bool = False
    outcome_weight: float = 1.0
    ealr_weight: float = 1.0
    skip_zero_groups: bool = True

    def __post_init__(self):
        if self.ealr_norm not in ("group_turn", "group", "joint"):
            raise UserError(
                f"AdvantageConfig.ealr_norm={self.ealr_norm!r} is not an option; use group_turn, group or joint"
            )
        if not 0.0 <= self.gamma <= 1.0:
            raise UserError(f"AdvantageConfig.gamma={self.gamma} must be within [0, 1]")
        for name in ("ealr_std_floor", "outcome_std_floor"):
            if not getattr(self, name) > 0:
                raise UserError(f"AdvantageConfig.{name}={getattr(self, name)} must be positive, such as 1e-6")


def last_turn(trajectories: Trajectories) -> np.ndarray:
    """`[B]` int32, the turn id of each trajectory's last action; -1 when it has none."""
    turn = np.where(np.asarray(trajectories.action_mask), np.asarray(trajectories.turn), -1)
    return turn.max(axis=1, initial=-1).astype(np.int32)


def normalised_outcome(outcome_B: Array, group_B: Array, config: AdvantageConfig) -> np.ndarray:
    """`[B]` float64, outcomes normalised within their group."""
    outcome, group = np.asarray(outcome_B, np.float64), np.asarray(group_B)
    result = np.zeros_like(outcome)
    for g in np.unique(group):
        rows = group == g
        result[rows] = _standardise(outcome[rows], config.outcome_std_floor, config)
    return result


def normalised_turns(value_BT: Array, valid_BT: Array, group_B: Array, config: AdvantageConfig) -> np.ndarray:
    """`[B, T]` float64, valid turn rewards normalised by `config.ealr_norm` (not `"joint"`); 0 elsewhere."""
    value, valid, group = np.asarray(value_BT, np.float64), np.asarray(valid_BT, bool), np.asarray(group_B)
    turns = value.shape[1]
    pools = np.eye(turns, dtype=bool) if config.ealr_norm == "group_turn" else np.ones((1, turns), bool)
    result = np.zeros_like(value)
    for g in np.unique(group):
        for pool in pools:
            members = valid & (group == g)[:, None] & pool[None, :]
            if members.sum() >= 2:
                result[members] = _standardise(value[members], config.ealr_std_floor, config)
    return result


def turn_advantages(rewards: TurnRewards, group_B: Array, last_turn_B: Array, config: AdvantageConfig) -> np.ndarray:
    """Normalises rewards within groups and sums them over the turns that follow.

    The normalised outcome is given to the last turn, on top of that turn's own reward. `A_k` includes `t = k`.

    Args:
      rewards: outcome `[B]`, value and valid `[B, T]`.
      group_B: `[B]` int.
      last_turn_B: `[B]` int, see `last_turn`; a row at -1 gets no outcome.
      config: the options.

    Returns:
      `[B, T]` float32. A NaN reward makes its group NaN, so that the update is skipped and counted.
    """
    value, valid = np.asarray(rewards.value, np.float64), np.asarray(rewards.valid, bool)
    outcome, group = np.asarray(rewards.outcome, np.float64), np.asarray(group_B)
    if config.ealr_norm == "joint":
        turns, outcomes = _joint(value, valid, outcome, group, config)
    else:
        turns = normalised_turns(value, valid, group, config)
        outcomes = normalised_outcome(outcome, group, config)

    # A weight of 0 removes a term even when that term is NaN: an unused reward must not stop the run.
    reward = config.ealr_weight * turns if config.ealr_weight else np.zeros_like(turns)
    last = np.asarray(last_turn_B)
    rows = np.flatnonzero(last >= 0)
    if config.outcome_weight:
        reward[rows, last[rows]] += config.outcome_weight * outcomes[rows]
    return discounted_returns(reward, config.gamma).astype(np.float32)


def discounted_returns(reward_BT: Array, gamma: float) -> np.ndarray:
    """`[B, T]` float64, `A_k = sum_{t >= k} gamma^(t - k) r_t` (arXiv 2608.06128, Eq. 9)."""
    returns = np.array(reward_BT, np.float64)
    for t in range(returns.shape[1] - 2, -1, -1):
        returns[:, t] += gamma * returns[:, t + 1]
    return returns


def token_advantages(advantage_BT: Array, trajectories: Trajectories) -> np.ndarray:
    """`[B, L]` float32, each action token gets its turn's advantage; 0 on every other token."""
    turn = np.clip(np.asarray(trajectories.turn, np.int64), 0, None)
    spread = np.take_along_axis(np.asarray(advantage_BT, np.float32), turn, axis=1)
    return np.where(np.asarray(trajectories.action_mask), spread, np.float32(0))


def zero_advantage_rows(advantage_BL: Array, group_B: Array) -> np.ndarray:
    """`[B]` bool, rows of groups in which every token advantage is exactly 0."""
    group = np.asarray(group_B)
    live = np.unique(group[(np.asarray(advantage_BL) != 0).any(axis=1)])
    return ~np.isin(group, live)


def group_statistics(outcome_B: Array, advantage_BL: Array, group_B: Array) -> dict[str, float]:
    """Counts per batch that tell whether groups still teach.

    Args:
      outcome_B: `[B]` float, rewards of the final answers.
      advantage_BL: `[B, L]` float, see `token_advantages`.
      group_B: `[B]` int.

    Returns:
      `groups`; `zero_variance_groups`: those whose outcomes are all equal; `zero_variance_share` of all groups;
      `skipped_groups`: those whose token advantages are all 0; `group_reward_variance`: population variance of the
      outcomes within a group, mean over groups.
    """
    outcome, group = np.asarray(outcome_B, np.float64), np.asarray(group_B)
    skipped = zero_advantage_rows(advantage_BL, group)
    ids = np.unique(group)
    members = [outcome[group == g] for g in ids]
    equal = sum(m.max() == m.min() for m in members)
    return {
        "groups": float(len(ids)),
        "zero_variance_groups": float(equal),
        "zero_variance_share": float(equal / max(len(ids), 1)),
        "skipped_groups": float(len(np.unique(group[skipped]))),
        "group_reward_variance": float(np.mean([m.var() for m in members])) if members else 0.0,
    }


def _standardise(rewards: np.ndarray, floor: float, config: AdvantageConfig) -> np.ndarray:
    return standardise(rewards, floor, config.std_normalise, config.leave_one_out, config.unbiased_std)


def _joint(
    value: np.ndarray, valid: np.ndarray, outcome: np.ndarray, group: np.ndarray, config: AdvantageConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Turn rewards and outcomes normalised together within each group (IGPO, arXiv 2510.14967)."""
    turns, outcomes = np.zeros_like(value), np.zeros_like(outcome)
    for g in np.unique(group):
        rows = group == g
        members = valid & rows[:, None]
        pool = np.concatenate([value[members], outcome[rows]])
        z = _standardise(pool, config.outcome_std_floor, config)
        turns[members], outcomes[rows] = z[: members.sum()], z[members.sum() :]
    return turns, outcomes
