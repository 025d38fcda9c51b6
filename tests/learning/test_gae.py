"""GAE over action tokens: the masked-value case, and equality with GAE on rows whose other tokens are cut out."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.learning.gae import gae, token_rewards, value_loss, whiten


def test_observation_values_never_leak():
    mask = np.array([[True, True, False]])
    advantage, returns = gae(np.array([[0.0, 1.0, 0.0]]), np.array([[0.0, 0.0, 100.0]]), mask)
    np.testing.assert_array_equal(advantage, [[1.0, 1.0, 0.0]])
    np.testing.assert_array_equal(returns, [[1.0, 1.0, 0.0]])
    # Also with the observation between the actions.
    advantage, _ = gae(np.array([[0.0, 0.0, 1.0]]), np.array([[0.0, np.nan, 0.5]]), np.array([[True, False, True]]))
    np.testing.assert_array_equal(advantage, [[1.0, 0.0, 0.5]])


def test_reward_on_an_observation_goes_to_the_action_before_it():
    advantage, _ = gae(np.array([[0.0, 2.0, 0.0]]), np.zeros((1, 3)), np.array([[True, False, True]]), gamma=0.5)
    np.testing.assert_array_equal(advantage, [[2.0, 0.0, 0.0]])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)]))
def test_equals_the_textbook_on_action_tokens_alone(seed, constants):
    gamma, lam = constants
    rng = np.random.default_rng(seed)
    mask = rng.random((1, 9)) < 0.6
    reward, value = rng.normal(size=(2, 1, 9)).astype(np.float32)
    reward = np.where(mask, reward, 0)
    advantage, returns = gae(reward, value, mask, gamma, lam)
    r, v = reward[mask], np.append(value[mask], 0)
    delta = r + gamma * v[1:] - v[:-1]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
    np.testing.assert_allclose(np.asarray(advantage)[mask], expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(returns)[mask], expected + v[:-1], atol=1e-5)
    assert not np.asarray(advantage)[~mask].any()


def test_whiten_ignores_masked_tokens():
    mask = np.array([[True, True, False, True]])
    got = whiten(np.array([[1.0, 3.0, 1e6, 5.0]]), mask)
    np.testing.assert_allclose(got, [[-np.sqrt(1.5), 0.0, 0.0, np.sqrt(1.5)]], rtol=1e-6, atol=1e-6)


def test_token_rewards_golden():
    mask = np.array([[False, True, False, True, False], [False] * 5])
    got = token_rewards(np.array([1.0, 1.0]), mask, np.full((2, 5), -1.0), np.full((2, 5), -3.0), kl_weight=0.1)
    np.testing.assert_allclose(got, [[0, -0.2, 0, 0.8, 0], [0] * 5], rtol=1e-6)


def test_value_loss_golden():
    # V = 2 moved 1 from V_old = 1, clipped to 1.5; the worse of (2 - 2)^2 and (1.5 - 2)^2 counts.
    value, old, target = np.array([[2.0, 9.0]]), np.array([[1.0, 0.0]]), np.array([[2.0, 0.0]])
    total, count = value_loss(value, old, target, np.array([[True, False]]))
    assert (float(total), float(count)) == (0.125, 1.0)
