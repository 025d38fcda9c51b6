"""The clipped policy objective (PPO's surrogate as GRPO uses it) with a KL term, and the supervised one.

An objective is a callable `(logprob_NL, batch, entropy_NL=None) -> (loss_sum, metrics)`. Each metric is either a pair
`(sum, count)`, which microbatches add up, or a scalar array, of which they keep the largest. `metrics["loss"]` is the
pair whose quotient is minimised; its sum is `loss_sum`. A new objective is one new file with one gin configurable.
"""

import dataclasses

import gin
import jax
import jax.numpy as jnp

from cipo_jax.errors import UserError
from cipo_jax.learning.aggregation import check_aggregation, token_weights
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.kl import ESTIMATORS, kl_estimate
from cipo_jax.types import Array

Metrics = dict[str, tuple[Array, Array] | Array]


@gin.configurable
@dataclasses.dataclass(frozen=True)
class ClippedObjective:
    """PPO's clipped surrogate on action tokens plus `kl_weight` times KL to the reference.

    `loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_weight KL - entropy_weight H`,
    `rho = exp(logprob - old_logprob)` per token (arXiv 1707.06347, Eq. 7; arXiv 2402.03300, Eq. 3).

    Attributes:
      clip_low: lower clip of the ratio.
      clip_high: upper clip of the ratio; above `clip_low` it is DAPO's clip-higher.
      kl_weight: factor on the KL term; 0 leaves it out of the loss (it is logged when a reference is given).
      kl_estimator: the one in the loss; all three are logged.
      k3_cap: see `kl_estimate`.
      entropy_weight: factor on the entropy bonus; needs a model function that returns entropies.
      aggregation: see `token_weights`.
      token_norm: see `token_weights`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 1e-3
    kl_estimator: str = "k3"
    k3_cap: float | None = 10.0
    entropy_weight: float = 0.0
    aggregation: str = "token_mean"
    token_norm: float | None = None

    def __post_init__(self):
        check_objective(self)

    def log_ratio(self, logprob_NL: Array, batch: UpdateBatch) -> Array:
        """`[N, L]` float32, log of the ratio that is clipped; 0 off action tokens."""
        return token_log_ratio(logprob_NL, batch)

    def __call__(self, logprob_NL: Array, batch: UpdateBatch, entropy_NL: Array | None = None) -> tuple[Array, Metrics]:
        """Loss sum and metrics of some rows.

        Args:
          logprob_NL: `[N, L]` float32, differentiable; values off `batch.action_mask` are ignored.
          batch: the rows.
          entropy_NL: `[N, L]` float32 entropies (nats) of the distributions the tokens came from, or None.

        Returns:
          float32 scalar, the sum to differentiate; metrics.
        """
        mask = batch.action_mask
        log_ratio = self.log_ratio(logprob_NL, batch)
        policy_loss, clipped = surrogate(log_ratio, batch.advantage, self.clip_low, self.clip_high)
        if batch.importance is not None:
            policy_loss = policy_loss * batch.importance
        loss = policy_loss

        metrics: Metrics = {}
        if batch.ref_logprob is not None:
            # Masked before the estimators: an exponential of padding must not put inf * 0 into the gradient.
            logprob = jnp.where(mask, logprob_NL, 0.0)
            ref = jnp.where(mask, batch.ref_logprob, 0.0)
            for name in ESTIMATORS:
                estimate = kl_estimate(logprob, ref, name, self.k3_cap)
                metrics[f"kl_{name}"] = masked_pair(jax.lax.stop_gradient(estimate), mask)
                if name == self.kl_estimator and self.kl_weight:
                    loss = loss + self.kl_weight * estimate
        elif self.kl_weight:
            raise UserError(f"kl_weight={self.kl_weight} needs reference log-probs; set kl_weight = 0 or a reference")
        if entropy_NL is not None:
            entropy = jnp.where(mask, entropy_NL, 0.0)
            metrics["entropy"] = masked_pair(jax.lax.stop_gradient(entropy), mask)
            if self.entropy_weight:
                loss = loss - self.entropy_weight * entropy
        elif self.entropy_weight:
            raise UserError(f"entropy_weight={self.entropy_weight} needs entropies; set it to 0 or compute entropies")

        weight, count = token_weights(mask, self.aggregation, self.token_norm)
        loss_sum = _weighted(loss, weight)
        metrics["loss"] = (loss_sum, count)
        metrics["policy_loss"] = (_weighted(policy_loss, weight), count)
        metrics.update(ratio_metrics(log_ratio, clipped, batch))
        return loss_sum, metrics


@gin.configurable
@dataclasses.dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of action tokens (nats), the loss of the warm start.

    Attributes:
      aggregation: see `token_weights`.
      token_norm: see `token_weights`.
    """

    aggregation: str = "token_mean"
    token_norm: float | None = None

    def __post_init__(self):
        check_aggregation(self.aggregation, self.token_norm)

    def __call__(self, logprob_NL: Array, batch: UpdateBatch, entropy_NL: Array | None = None) -> tuple[Array, Metrics]:
        """Loss sum and metrics of some rows; see `ClippedObjective.__call__`. Only tokens and masks are read."""
        mask = batch.action_mask
        loss = -jnp.where(mask, logprob_NL, 0.0)
        weight, count = token_weights(mask, self.aggregation, self.token_norm)
        loss_sum = _weighted(loss, weight)
        metrics: Metrics = {"loss": (loss_sum, count), "nll": masked_pair(jax.lax.stop_gradient(loss), mask)}
        if entropy_NL is not None:
            metrics["entropy"] = masked_pair(jax.lax.stop_gradient(jnp.where(mask, entropy_NL, 0.0)), mask)
        return loss_sum, metrics


def check_objective(objective) -> None:
    """Raises UserError for options of a clipped objective that cannot work."""
    check_aggregation(objective.aggregation, objective.token_norm)
    if objective.kl_estimator not in ESTIMATORS:
        raise UserError(f"kl_estimator={objective.kl_estimator!r} is not an option; use one of {', '.join(ESTIMATORS)}")
    if not 0.0 <= objective.clip_low <= 1.0:
        raise UserError(f"clip_low={objective.clip_low} must be within [0, 1], such as 0.2")
    if objective.clip_high < 0.0:
        raise UserError(f"clip_high={objective.clip_high} must not be negative; use, for example, 0.2")


def token_log_ratio(logprob_NL: Array, batch: UpdateBatch) -> Array:
    """`[N, L]` float32, `logprob - old_logprob` on tokens in the loss, else 0.

    Finite values are clamped to +-20 against overflow. A non-finite one becomes NaN instead of being clamped: it must
    reach the loss, where the update is skipped.
    """
    old = jax.lax.stop_gradient(logprob_NL) if batch.old_logprob is None else batch.old_logprob
    log_ratio = jnp.where(batch.action_mask, logprob_NL - old, 0.0)
    return jnp.where(jnp.isfinite(log_ratio), jnp.clip(log_ratio, -20.0, 20.0), jnp.nan)


def surrogate(log_ratio: Array, advantage: Array, clip_low: float, clip_high: float) -> tuple[Array, Array]:
    """Clipped surrogate loss per token, and where the clip is active (the gradient there is 0)."""
    ratio = jnp.exp(log_ratio)
    free = -ratio * advantage
    bounded = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    clipped = bounded > free
    # A select and not a maximum, whose gradient is halved between equal operands.
    return jnp.where(clipped, bounded, free), clipped


def ratio_metrics(log_ratio: Array, clipped: Array, batch: UpdateBatch) -> Metrics:
    """Ratio and clip statistics over tokens in the loss; `kl_old` is k3 of the sampling policy to this one."""
    mask = batch.action_mask
    log_ratio = jax.lax.stop_gradient(log_ratio)
    ratio = jnp.exp(log_ratio)
    return {
        "ratio": masked_pair(ratio, mask),
        "ratio_max": jnp.where(mask, ratio, 0.0).max(),
        "kl_old": masked_pair(ratio - 1.0 - log_ratio, mask),
        "clip_fraction": masked_pair(clipped.astype(jnp.float32), mask),
        "advantage": masked_pair(batch.advantage, mask),
        "advantage_abs": masked_pair(jnp.abs(batch.advantage), mask),
    }


def masked_pair(x_NL: Array, mask_NL: Array) -> tuple[Array, Array]:
    """(sum over the mask, number of tokens in it), float32."""
    return jnp.where(mask_NL, x_NL, 0.0).sum(), mask_NL.sum(dtype=jnp.float32)


def _weighted(x: Array, weight: Array) -> Array:
    return jnp.where(weight > 0, x * weight, 0.0).sum()
