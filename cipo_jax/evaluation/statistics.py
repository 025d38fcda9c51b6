"""Intervals and paired comparisons. scipy does the arithmetic; degenerate samples get the interval they deserve."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
      value: the estimate.
      low, high: ends of the interval, NaN where it is undefined (a mean of one value).
      n: how many values it rests on.
    """

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2) -> str:
        """`0.71 [0.67, 0.75]`; the value alone where the interval is undefined."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclasses.dataclass(frozen=True)
class Spread:
    """Values over seeds: mean, sample standard deviation (0 for one value), smallest and largest."""

    mean: float
    std: float
    smallest: float
    largest: float
    n: int


def wilson(share: float, n: int, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a share.

    Args:
      share: successes / n, in [0, 1].
      n: trials; 0 gives NaN.
      confidence: coverage.
    """
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    interval = stats.binomtest(round(share * n), n).proportion_ci(confidence, method="wilson")
    return Estimate(share, float(interval.low), float(interval.high), n)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The mean with Student's t interval: for a handful of seeds, whose bootstrap would be too narrow."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Estimate(float(x.mean()) if len(x) else math.nan, math.nan, math.nan, len(x))
    if _all_equal(x):
        return Estimate(float(x.mean()), float(x.mean()), float(x.mean()), len(x))
    low, high = stats.t.interval(confidence, len(x) - 1, loc=x.mean(), scale=stats.sem(x))
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> tuple[Estimate, float]:
    """Mean of `a - b` over pairs (seeds) with Student's t interval, and the two-sided p-value of the paired t-test.

    Equal differences throughout give an interval of width 0 and p = 1 if they are 0, else p = 0; fewer than two pairs
    give NaN.

    Raises:
      ValueError: if the two are not of one length.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    estimate = mean_interval(difference, confidence)
    if len(difference) < 2:
        return estimate, math.nan
    if _all_equal(difference):
        return estimate, 1.0 if _all_equal(np.append(difference, 0.0)) else 0.0
    return estimate, float(stats.ttest_1samp(difference, 0.0).pvalue)


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """The mean with a percentile bootstrap interval.

    Args:
      values: `[N]`.
      clusters: `[N]` labels of values that hang together, such as the questions of one world; whole clusters are drawn.
        None draws single values.
      confidence: coverage.
      resamples: bootstrap samples.
      seed: fixes them.
    """
    x = np.asarray(values, np.float64)
    if not len(x):
        return Estimate(math.nan, math.nan, math.nan, 0)
    _, label = np.unique(np.arange(len(x)) if clusters is None else np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(label, x), np.bincount(label)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for i in range(resamples):  # a loop keeps memory at one resample
        drawn = rng.integers(len(sums), size=len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread over seeds; at least one value."""
    x = np.asarray(values, np.float64)
    std = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return Spread(float(x.mean()), std, float(x.min()), float(x.max()), len(x))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of the p-values of one family; NaN stays NaN and does not count."""
    p = np.asarray(p_values, np.float64)
    order = [i for i in np.argsort(p) if not math.isnan(p[i])]
    out, running = np.full(len(p), math.nan), 0.0
    for place, i in enumerate(order):
        running = max(running, min(1.0, (len(order) - place) * p[i]))
        out[i] = running
    return out.tolist()


def _all_equal(x: np.ndarray) -> bool:
    """Equal but for rounding: .7 - .4 and .5 - .2 are one difference."""
    return bool(np.ptp(x) <= 1e-12 * max(1.0, float(np.abs(x).max())))
