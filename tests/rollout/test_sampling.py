"""Samplers draw from the distribution whose log-probs they report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cipo_jax.rollout.sampling import Sampling, sample, truncate

LOGITS = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.07, 0.03]]))


@pytest.mark.parametrize("sampler", ["gumbel", "inverse_cdf"])
@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8)])
def test_frequencies_match_the_reported_probabilities(sampler, temperature, top_k, top_p):
    n = 20_000
    sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))
    tokens, logprob = sample(jnp.tile(LOGITS, (n, 1)), jax.random.split(jax.random.key(0), n), sampling, sampler)
    share = np.bincount(np.asarray(tokens), minlength=5) / n
    p = np.asarray([0.5, 0.25, 0.15, 0.07, 0.03]) ** (1 / temperature)
    p[{3: 3, 0: 5}[top_k] if top_p == 1 else 3 :] = 0
    p /= p.sum()
    np.testing.assert_allclose(share, p, atol=0.015)
    np.testing.assert_allclose(np.exp(logprob), p[np.asarray(tokens)], rtol=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    kept = np.isfinite(np.asarray(truncate(LOGITS, 0, np.float32(0.74))))[0]
    assert kept.tolist() == [True, True, False, False, False]
    kept = np.isfinite(np.asarray(truncate(LOGITS, 0, np.float32(0.76))))[0]
    assert kept.tolist() == [True, True, True, False, False]
    assert np.isfinite(np.asarray(truncate(LOGITS, 0, np.float32(1e-6)))).sum() == 1


def test_greedy_takes_the_likeliest_with_its_untempered_logprob():
    token, logprob = sample(LOGITS, jax.random.split(jax.random.key(0), 1), Sampling(np.float32(0.0), 0, 1.0))
    assert int(token[0]) == 0
    np.testing.assert_allclose(float(logprob[0]), np.log(0.5), rtol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours():
    keys = jax.random.split(jax.random.key(1), 6)
    logits = jax.random.normal(jax.random.key(2), (6, 40))
    together = sample(logits, keys, Sampling())[0]
    alone = [int(sample(logits[i : i + 1], keys[i : i + 1], Sampling())[0][0]) for i in range(6)]
    assert together.tolist() == alone
