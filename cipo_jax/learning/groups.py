"""Groups: the rollouts of one question, and normalisation of rewards within them."""

from collections.abc import Hashable, Sequence

import numpy as np


def group_ids(questions: Sequence[Hashable]) -> np.ndarray:
    """Numbers questions in the order they are first seen.

    Args:
      questions: one key per rollout, naming the data set and the question in it, for example `("nq", "17")`. A row
        index alone is no key: row `i` of two data sets would share a group.

    Returns:
      `[B]` int32, equal exactly where the keys are equal.
    """
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in questions], np.int32)


def standardise(
    rewards: np.ndarray,
    floor: float,
    std_normalise: bool = True,
    leave_one_out: bool = False,
    unbiased_std: bool = False,
) -> np.ndarray:
    """Normalises the rewards of one group: `(r - mean) / (std + floor)`, in float64.

    Equal rewards give exactly 0 whatever their float residue. A group of one has mean 0 and std 1.

    Args:
      rewards: `[n]` float.
      floor: added to the std, so that a tiny spread is not blown up.
      std_normalise: False gives `r - mean` (Dr. GRPO); the floor is then unused.
      leave_one_out: subtract the mean of the *other* rewards (RLOO). The std stays that of the whole group (our
        choice): a std that leaves the odd one out of `[.35] * 7 + [1.]` is float residue and would explode.
      unbiased_std: divide by `n - 1` inside the std (Search-R1, verl) instead of `n`.

    Returns:
      `[n]` float64. With a population std, `|z| <= sqrt(n - 1)`, or `n / sqrt(n - 1)` with `leave_one_out`.
    """
    r = np.asarray(rewards, np.float64)
    n = r.size
    if n == 0:
        return r
    if n == 1:
        return r / (1.0 + floor) if std_normalise else r
    if r.max() == r.min():
        return np.zeros_like(r)
    centred = r - r.mean()
    std = r.std(ddof=1 if unbiased_std else 0)
    if leave_one_out:
        centred = centred * (n / (n - 1))
    return centred / (std + floor) if std_normalise else centred
