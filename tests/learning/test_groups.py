"""Group ids and normalisation within a group: hand-computed values, float residue, bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.learning.groups import group_ids, standardise

REWARDS = st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=16)


def test_row_i_of_two_data_sets_is_two_groups():
    np.testing.assert_array_equal(group_ids([("nq", "0"), ("nq", "0"), ("hotpotqa", "0"), ("nq", "1")]), [0, 0, 1, 2])
    assert group_ids([("nq", "0")]).dtype == np.int32


def test_golden():
    # mean 0.25; population std sqrt(3)/4, sample std 1/2
    r = [1.0, 0.0, 0.0, 0.0]
    s = np.sqrt(3) / 4
    np.testing.assert_allclose(standardise(r, 0.1), np.array([0.75, -0.25, -0.25, -0.25]) / (s + 0.1))
    np.testing.assert_allclose(standardise(r, 0.1, unbiased_std=True), np.array([0.75, -0.25, -0.25, -0.25]) / 0.6)
    np.testing.assert_allclose(standardise(r, 0.1, std_normalise=False), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(
        standardise(r, 0.1, std_normalise=False, leave_one_out=True), [1.0, -1 / 3, -1 / 3, -1 / 3]
    )


def test_group_of_one_has_mean_zero_and_std_one():
    np.testing.assert_allclose(standardise([0.7], 1e-6), [0.7], rtol=2e-6)
    np.testing.assert_allclose(standardise([0.7], 1e-6, leave_one_out=True), [0.7], rtol=2e-6)
    np.testing.assert_array_equal(standardise([0.75], 1e-6, std_normalise=False), [0.75])
    assert standardise([], 1e-6).shape == (0,)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("unbiased_std", [False, True])
def test_float_residue_is_bounded(leave_one_out, unbiased_std):
    z = standardise(
        np.array([0.35] * 7 + [1.0], np.float32), 1e-6, leave_one_out=leave_one_out, unbiased_std=unbiased_std
    )
    assert np.abs(z).max() < 8 / np.sqrt(7)
    np.testing.assert_allclose(z[:7], z[0])


def test_equal_rewards_are_exactly_zero():
    for value in (0.35, 0.1, 1 / 3, 1e-30):
        for options in ({}, {"leave_one_out": True}, {"std_normalise": False}):
            assert not standardise(np.full(7, value, np.float32), 1e-6, **options).any()


def test_last_bit_noise_stays_small():
    noise = np.float32(0.35) + np.array([0, 1, 0, 0], np.float32) * np.spacing(np.float32(0.35))
    assert np.abs(standardise(noise, 1e-6)).max() < 0.1


def test_nan_is_not_hidden():
    assert np.isnan(standardise([np.nan, 1.0, 0.0], 0.1)).all()


@settings(deadline=None)
@given(REWARDS, st.booleans(), st.booleans())
def test_properties(rewards, leave_one_out, std_normalise):
    z = standardise(rewards, 1e-6, std_normalise, leave_one_out)
    n = len(rewards)
    assert abs(z.sum()) < 1e-6 * n * max(1.0, np.abs(z).max())
    order = np.argsort(np.asarray(rewards), kind="stable")
    assert (np.diff(z[order]) >= -1e-9).all()
    if std_normalise:
        assert np.abs(z).max() <= (n / np.sqrt(n - 1) if leave_one_out else np.sqrt(n - 1)) + 1e-6
    if leave_one_out and not std_normalise:
        others = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
        np.testing.assert_allclose(z, others, atol=1e-9)
