"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (J. Schulman, "Approximating KL")."""

import jax.numpy as jnp

from cipo_jax.errors import UserError
from cipo_jax.types import Array

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprob: Array, ref_logprob: Array, estimator: str, k3_cap: float | None = None) -> Array:
    """Per-token KL estimate in nats, any shape, float32.

    With `d = logprob - ref_logprob`: `k1 = d` is unbiased as a value, but its gradient has expectation 0 on policy;
    `k2 = d^2 / 2` has the KL's gradient on policy; `k3 = exp(-d) - 1 + d` is unbiased and positive as a value, and its
    gradient is that of the reverse KL(reference || policy).

    Args:
      logprob: policy, differentiable.
      ref_logprob: reference.
      estimator: `"k1"`, `"k2"` or `"k3"`.
      k3_cap: k3 is clipped to `[-k3_cap, k3_cap]`, which also cuts its gradient there (verl: 10); None for no cap. The
        exponent is always clamped to 20 against overflow.
    """
    d = logprob - ref_logprob
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    if estimator == "k3":
        k3 = jnp.expm1(jnp.clip(-d, -20.0, 20.0)) + d
        return k3 if k3_cap is None else jnp.clip(k3, -k3_cap, k3_cap)
    raise UserError(f"kl_estimator={estimator!r} is not an option; use one of {', '.join(ESTIMATORS)}")
