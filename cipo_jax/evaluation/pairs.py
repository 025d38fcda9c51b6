"""Does EALR prefer the action that follows the evidence? Scripted pairs that differ in their last action alone."""

from collections.abc import Callable, Sequence

import numpy as np

from cipo_jax.evaluation.scripted import Pair, demonstration_trajectories
from cipo_jax.evaluation.statistics import Estimate, wilson
from cipo_jax.protocols.base import Protocol
from cipo_jax.types import Trajectories

Score = Callable[[Trajectories], tuple[np.ndarray, np.ndarray]]


def preference(
    pairs: Sequence[Pair], protocol: Protocol, observation_tokens: int, score: Score, shape: Trajectories
) -> Estimate:
    """Share of pairs in which EALR of the evidence-following last action exceeds that of the remembered one.

    Args:
      pairs: see `scripted.evidence_pairs`.
      protocol: encodes them.
      observation_tokens: budget of an observation, as in the rollout.
      score: visible and counterfactual log-probs `[B, L]` of a batch.
      shape: a batch whose array shapes `score` was compiled for; pairs are scored in batches of that size.

    Returns:
      The share with its Wilson interval.
    """
    rows = len(shape)
    values = []
    demos = [demo for pair in pairs for demo in (pair.follow, pair.remember)]
    for at in range(0, len(demos), rows):
        part = demos[at : at + rows]
        batch = padded(demonstration_trajectories(part, protocol, observation_tokens), shape)
        visible, hidden = score(batch)
        last = np.where(batch.action_mask, batch.turn, -1).max(1)
        for row in range(len(part)):
            start, end = batch.action_span[row, last[row]]
            values.append(float((visible - hidden)[row, start:end].mean()))  # EALR of the last action (Eq. 5)
    follow, remember = np.asarray(values).reshape(-1, 2).T
    return wilson(float((follow > remember).mean()), len(follow))


def padded(trajectories: Trajectories, shape: Trajectories) -> Trajectories:
    """Host arrays padded with empty rows, tokens, turns and passages to the shapes of `shape`."""
    out = {}
    for name in Trajectories.__dataclass_fields__:
        small, big = np.asarray(getattr(trajectories, name)), getattr(shape, name)
        fill = -1 if name in ("turn", "passage_row") else 0
        out[name] = np.full(big.shape, fill, big.dtype)
        out[name][tuple(slice(n) for n in small.shape)] = small
    return Trajectories(**out)
