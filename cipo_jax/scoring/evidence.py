"""The scoring pass of a training step: visible and counterfactual log-probs of every action token, then EALR."""

import dataclasses
from typing import Any

import jax
import numpy as np

from cipo_jax.distributed.arrays import fetch
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.scoring.counterfactuals import Counterfactual
from cipo_jax.scoring.packing import pack
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Trajectories


@dataclasses.dataclass
class EvidenceScores:
    """Log-probs (nats, float32 `[B, L]`, 0 off action tokens) that are being computed; `fetch` waits for them."""

    passes: list[tuple[Any, Any, Any]]

    def fetch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Host arrays `(visible, entropy, counterfactual)`."""
        (visible, entropy, counterfactual), *rest = fetch(self.passes)
        for again, _, more in rest:  # each token is a target in one pass; elsewhere `more` repeats the visible value
            counterfactual = np.where(more != again, more, counterfactual)
        return np.asarray(visible), np.asarray(entropy), np.asarray(counterfactual)


class EvidenceScorer:
    """Scores trajectories and one counterfactual of them in a single forward.

    Args:
      scorer: scores tokens under a policy.
      counterfactual: what is hidden from the next action.
      capacity: places per row for copied tokens; None for the length of a row. Copies that don't fit cost another pass.
      rules: sharding table.
    """

    def __init__(
        self, scorer: Scorer, counterfactual: Counterfactual, rules: ShardingRules, capacity: int | None = None
    ):
        self.counterfactual, self.capacity, self.rules = counterfactual, capacity, rules
        self._program = jax.jit(scorer.__call__, out_shardings=rules.batch)

    def __call__(self, params, trajectories: Trajectories, host: Trajectories) -> EvidenceScores:
        """Starts the pass at temperature 1 (both terms of EALR come from it, never from behaviour log-probs).

        Args:
          params: the frozen rollout policy's parameters.
          trajectories: on the device; `host` holds the same on this process.
        """
        copies = [self.counterfactual.copies(host, row) for row in range(len(host))]
        streams = pack(host, copies, self.capacity or host.tokens.shape[1])
        return EvidenceScores(
            [
                self._program(
                    params,
                    trajectories.tokens,
                    trajectories.length,
                    trajectories.action_mask,
                    np.float32(1.0),
                    self.rules.put_batch(stream),
                )
                for stream in streams
            ]
        )
