"""GiGPO's two advantages by hand."""

import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.learning.gigpo import GigpoConfig, gigpo_advantages

PRESENT = np.array([[True, True], [True, True], [True, False]])
OBSERVATIONS = [["question", "paris is big"], ["question", "paris is bigg"], ["question", ""]]


def run(outcome, **options):
    config = GigpoConfig(std_normalise=False, gamma=0.5, **options)
    return gigpo_advantages(outcome, np.zeros((3, 2)), PRESENT, OBSERVATIONS, np.zeros(3), config)


def test_golden():
    """Outcomes 1, 0, 0: episode advantages 2/3, -1/3, -1/3. Step returns at turn 0 are 1/2, 0, 0 (mean 1/6)."""
    step = np.array([[1 / 3, 0], [-1 / 6, 0], [-1 / 6, 0]])  # turn 1: two observations, each alone
    episode = np.array([[2 / 3, 2 / 3], [-1 / 3, -1 / 3], [-1 / 3, 0]])
    np.testing.assert_allclose(run([1.0, 0.0, 0.0]), episode + step, rtol=1e-6)
    np.testing.assert_allclose(run([1.0, 0.0, 0.0], omega=0.0), episode, rtol=1e-6)
    step[:, 1] = [0.5, -0.5, 0]  # similar observations share a group: returns 1 and 0
    np.testing.assert_allclose(run([1.0, 0.0, 0.0], similarity=0.9), episode + step, rtol=1e-6)


def test_groups_do_not_mix():
    got = gigpo_advantages(
        [1.0, 1.0, 0.0, 0.0],
        np.zeros((4, 1)),
        np.ones((4, 1), bool),
        [["same"]] * 4,
        np.array([0, 0, 1, 1]),
        GigpoConfig(),
    )
    assert not got.any()


def test_bad_similarity_is_refused():
    with pytest.raises(UserError, match="similarity=0"):
        GigpoConfig(similarity=0.0)
