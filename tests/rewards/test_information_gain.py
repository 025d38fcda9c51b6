"""IGPO's turn rewards by hand; they telescope."""

import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.rewards.information_gain import information_gain

PRIOR = np.array([-2.0, -1.0])
LOGPROB = np.array([[-1.5, 9.0, -0.5], [-3.0, 9.0, 9.0]])
VALID = np.array([[True, False, True], [True, False, False]])


def test_golden():
    gain, valid = information_gain(PRIOR, LOGPROB, VALID)
    np.testing.assert_allclose(gain, [[0.5, 0, 1.0], [-2.0, 0, 0]])
    np.testing.assert_array_equal(valid, VALID)
    prob, _ = information_gain(PRIOR, LOGPROB, VALID, belief="prob")
    np.testing.assert_allclose(prob[0], [np.exp(-1.5) - np.exp(-2), 0, np.exp(-0.5) - np.exp(-1.5)], rtol=1e-6)
    np.testing.assert_allclose(gain.sum(1), [-0.5 + 2.0, -3.0 + 1.0])


def test_bad_belief_is_refused():
    with pytest.raises(UserError, match="belief='odds'"):
        information_gain(PRIOR, LOGPROB, VALID, belief="odds")
