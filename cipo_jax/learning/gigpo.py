"""GiGPO (verl-agent): an episode advantage plus a step advantage among turns that started from the same observation."""

import dataclasses
import difflib
from collections.abc import Sequence

import gin
import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.learning.advantages import discounted_returns
from cipo_jax.learning.groups import standardise
from cipo_jax.types import Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class GigpoConfig:
    """Defaults of verl-agent's search recipe.

    Attributes:
      omega: factor on the step advantage.
      gamma: discount per turn of the step return.
      similarity: observations at least this similar (difflib ratio) share a step group; 1.0 wants them identical.
      std_normalise: divide by the std (plus `std_floor`) in both parts.
      std_floor: added to the std.
    """

    omega: float = 1.0
    gamma: float = 0.95
    similarity: float = 1.0
    std_normalise: bool = True
    std_floor: float = 1e-6

    def __post_init__(self):
        if not 0.0 < self.similarity <= 1.0:
            raise UserError(f"GigpoConfig.similarity={self.similarity} must be within (0, 1]; 1.0 wants identity")


def gigpo_advantages(
    outcome_B: Array,
    step_reward_BT: Array,
    present_BT: Array,
    observations: Sequence[Sequence[str]],
    group_B: Array,
    config: GigpoConfig,
) -> np.ndarray:
    """`A_episode + omega A_step` of every turn.

    Args:
      outcome_B: `[B]` float32; given to the last present turn for the step returns as well.
      step_reward_BT: `[B, T]` float32, other rewards of a turn (such as -0.01 for an invalid action).
      present_BT: `[B, T]` bool, turns with an action.
      observations: per row and turn, the text the turn was conditioned on last (the question for turn 0).
      group_B: `[B]` int.
      config: the options.

    Returns:
      `[B, T]` float32, 0 where no turn is present. A step group of one gives 0.
    """
    outcome, present, group = np.asarray(outcome_B, np.float64), np.asarray(present_BT, bool), np.asarray(group_B)
    reward = np.where(present, np.asarray(step_reward_BT, np.float64), 0.0)
    episode_reward = outcome + reward.sum(1)
    last = np.where(present, np.arange(present.shape[1]), -1).max(axis=1, initial=-1)
    rows = np.flatnonzero(last >= 0)
    reward[rows, last[rows]] += outcome[rows]
    returns = discounted_returns(reward, config.gamma)

    advantage = np.zeros_like(returns)
    for g in np.unique(group):
        members = np.flatnonzero(group == g)
        episode = standardise(episode_reward[members], config.std_floor, config.std_normalise)
        advantage[members] += episode[:, None]
        cells = [(b, t) for b in members for t in np.flatnonzero(present[b])]
        for cluster in _clusters(cells, observations, config.similarity):
            if len(cluster) >= 2:
                index = tuple(np.array(cluster).T)
                step = standardise(returns[index], config.std_floor, config.std_normalise)
                advantage[index] += config.omega * step
    return np.where(present, advantage, 0.0).astype(np.float32)


def _clusters(cells, observations, similarity: float) -> list[list[tuple[int, int]]]:
    """Puts each turn with the first earlier cluster whose first observation is similar enough."""
    clusters: list[tuple[str, list]] = []
    exact: dict[str, list] = {}
    for b, t in cells:
        text = observations[b][t]
        home = exact.get(text)
        if home is None and similarity < 1.0:
            close = (c for first, c in clusters if difflib.SequenceMatcher(None, first, text).ratio() >= similarity)
            home = next(close, None)
        if home is None:
            home = []
            clusters.append((text, home))
        exact[text] = home
        home.append((b, t))
    return [cluster for _, cluster in clusters]
