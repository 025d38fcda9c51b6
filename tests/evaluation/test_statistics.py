import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.evaluation.statistics import bootstrap_mean, mean_interval, paired_difference, spread, wilson


def test_wilson_by_hand():
    # (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = .7, n = 10, z = 1.959964
    z, p, n = 1.959963985, 0.7, 10
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    got = wilson(0.7, 10)
    assert (got.low, got.high) == pytest.approx(((centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)))
    assert got.text() == "0.70 [0.40, 0.89]"
    assert wilson(0.0, 20).low == 0.0 and wilson(0.0, 20).high == pytest.approx(0.161, abs=1e-3)
    assert math.isnan(wilson(0.0, 0).value) and wilson(0.0, 0).text() == "-"


def test_t_interval_by_hand():
    # mean 2, sd 1, se 1/sqrt(3), t(.975, 2) = 4.302653
    got = mean_interval([1.0, 2.0, 3.0])
    assert (got.value, got.high - 2) == pytest.approx((2.0, 4.302653 / math.sqrt(3)), abs=1e-5)
    assert mean_interval([0.3]).text() == "0.30"
    assert mean_interval([0.3, 0.3]).text() == "0.30 [0.30, 0.30]"


def test_paired_difference_by_hand():
    # differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641, two-sided p with 2 degrees of freedom = .07418
    got, p = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (got.value, p) == pytest.approx((2.0, 0.07418), abs=1e-5)
    assert paired_difference([1.0, 2.0], [1.0, 2.0])[1] == 1.0
    assert paired_difference([2.0, 3.0], [1.0, 2.0])[1] == 0.0
    assert paired_difference([0.7, 0.5], [0.4, 0.2])[0].text(1) == "0.3 [0.3, 0.3]"  # .7 - .4 != .5 - .2 in floats
    assert math.isnan(paired_difference([1.0], [0.0])[1])
    with pytest.raises(ValueError, match="paired"):
        paired_difference([1.0], [1.0, 2.0])


@given(
    st.lists(st.integers(-50, 50).map(lambda k: k / 10), min_size=2, max_size=9),
    st.integers(-30, 30).map(lambda k: k / 10),
)
@settings(deadline=None, max_examples=40)
def test_paired_difference_ignores_what_pairs_share(values, shift):
    noise = np.linspace(-7, 11, len(values))
    a, b = noise + values, noise
    got, _ = paired_difference(a + shift, b)
    plain = mean_interval(values)
    assert (got.value, got.low, got.high) == pytest.approx(
        (plain.value + shift, plain.low + shift, plain.high + shift), abs=1e-9
    )


def test_bootstrap_interval_covers_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for i in range(100):
        got = bootstrap_mean(rng.random(80) < 0.3, resamples=300, seed=i)
        covered += got.low <= 0.3 <= got.high
    assert 86 <= covered <= 100


def test_clusters_widen_the_interval():
    world = np.repeat(np.arange(20), 30)
    values = (world % 2 == 0).astype(float)  # the questions of a world stand or fall together
    single, clustered = bootstrap_mean(values), bootstrap_mean(values, world.astype(str))
    assert single.value == clustered.value == 0.5
    # se .5/sqrt(600) against .5/sqrt(20)
    ratio = (clustered.high - clustered.low) / (single.high - single.low)
    assert ratio == pytest.approx(math.sqrt(30), rel=0.2)
    assert bootstrap_mean(values, world.astype(str)) == clustered


def test_spread():
    got = spread([0.6, 0.7, 0.8])
    assert (got.mean, got.std, got.smallest, got.largest, got.n) == pytest.approx((0.7, 0.1, 0.6, 0.8, 3))
    assert spread([0.5]).std == 0.0
