"""IGPO's turn reward (arXiv 2510.14967): how much a turn raises the policy's belief in the gold answer."""

import numpy as np

from cipo_jax.errors import UserError
from cipo_jax.types import Array


def information_gain(
    prior_logprob_B: Array, logprob_BT: Array, valid_BT: Array, belief: str = "logprob"
) -> tuple[np.ndarray, np.ndarray]:
    """`v_t - v_{t-1}` for every scored turn, `v_0` being the belief from the prompt alone.

    Args:
      prior_logprob_B: `[B]` float32, mean log-prob (nats per token) of the gold answer appended to the prompt.
      logprob_BT: `[B, T]` float32, the same after turn `t`.
      valid_BT: `[B, T]` bool, turns that were scored. The turn before a valid one is the last valid one.
      belief: `v` is the mean log-prob (`"logprob"`, the authors' script) or its exponential (`"prob"`, the paper).

    Returns:
      `[B, T]` float32, 0 where not valid, and `[B, T]` bool as given.

    Raises:
      UserError: an unknown belief.
    """
    if belief not in ("logprob", "prob"):
        raise UserError(f"belief={belief!r} is not an option of information_gain; use 'logprob' or 'prob'")
    transform = np.exp if belief == "prob" else np.asarray
    value, valid = transform(np.asarray(logprob_BT, np.float32)), np.asarray(valid_BT, bool)
    before = np.array(transform(np.asarray(prior_logprob_B, np.float32)))
    gain = np.zeros_like(value)
    for t in range(value.shape[1]):
        gain[:, t] = np.where(valid[:, t], value[:, t] - before, 0)
        before = np.where(valid[:, t], value[:, t], before)
    return gain, valid
