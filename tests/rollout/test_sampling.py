"""Samplers draw from the distribution whose log-probs they report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cipo_jax.rollout.sampling import Sampling, _exponential, sample, truncate

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


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("sampler", ["gumbel", "inverse_cdf"])
def test_large_vocabularies_in_lanes(sampler, temperature):
    """Several tokens per lane, a last row of lanes that is not full, and many unlikely tokens."""
    V, n = 300, 60_000
    logits = 2.0 * np.random.default_rng(0).standard_normal(V).astype(np.float32)
    sampling = Sampling(np.float32(temperature), np.int32(0), np.float32(1.0))
    run = jax.jit(lambda keys: sample(jnp.broadcast_to(logits, (n, V)), keys, sampling, sampler))
    tokens, logprob = (np.asarray(x) for x in run(jax.random.split(jax.random.key(1), n)))
    p = np.exp(logits - logits.max(), dtype=np.float64)
    p /= p.sum()
    np.testing.assert_allclose(logprob, np.log(p[tokens]), atol=1e-5)
    if temperature == 0:
        assert (tokens == logits.argmax()).all()
        return
    expected = n * p
    chi2 = ((np.bincount(tokens, minlength=V) - expected) ** 2 / expected).sum()
    assert chi2 < V + 5 * np.sqrt(2 * V)  # mean and spread of its distribution


def test_noise_is_exponential_and_independent_over_tokens_and_rows():
    seed = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(jax.random.split(jax.random.key(0), 64))
    noise = np.asarray(_exponential(seed[..., None], jnp.arange(2**14, dtype=jnp.uint32)[None]))
    assert (noise > 0).all()
    level = np.sort(1 - np.exp(-noise.astype(np.float64).ravel()))
    assert abs(level - (np.arange(level.size) + 0.5) / level.size).max() < 2 / np.sqrt(level.size)  # Kolmogorov-Smirnov
    z = (noise - noise.mean()) / noise.std()
    for shifted in (np.roll(z, 1, 0), np.roll(z, 1, 1), np.roll(z, 128, 1), np.roll(z, (1, 1), (0, 1))):
        assert abs((z * shifted).mean()) < 5 / np.sqrt(z.size)
    # The smallest of many, which wins, is exponential too.
    least = noise.reshape(64 * 16, 1024).min(1) * 1024
    assert abs(least.mean() - 1) < 0.15 and abs(least.std() - 1) < 0.2


def test_rounding_of_the_logits_seldom_changes_the_token():
    keys = jax.random.split(jax.random.key(3), 512)
    logits = 2.0 * jax.random.normal(jax.random.key(4), (512, 1000))
    noisy = logits + 1e-5 * jax.random.normal(jax.random.key(5), logits.shape)
    assert (sample(logits, keys, Sampling())[0] != sample(noisy, keys, Sampling())[0]).sum() <= 1


@pytest.mark.parametrize("top_k,top_p", [(1, 1.0), (7, 1.0), (0, 0.3), (0, 0.999), (40, 0.7), (500, 0.5), (0, 1.0)])
def test_truncation_equals_sorting(top_k, top_p):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, 300)).astype(np.float32) * 3
    z[1] = np.round(z[1])  # ties, zeros of both signs
    z[2] = -5.0
    z[3, 7] = 80.0
    got = np.asarray(truncate(jnp.asarray(z), np.int32(top_k), np.float32(top_p)))
    for row, kept in zip(z, got, strict=True):
        order = np.sort(row)[::-1].astype(np.float64)
        order = order[order >= order[(top_k or 300) - 1]] if top_k <= 300 else order
        p = np.exp(order - order[0]) / np.exp(order - order[0]).sum()
        least = order[np.cumsum(p) - p < top_p - 1e-6].min() if top_p < 1 else order[-1]
        assert (np.isfinite(kept) == (row >= least)).all()
        assert (kept[np.isfinite(kept)] == row[np.isfinite(kept)]).all()


def test_nothing_outside_top_p_is_drawn():
    keys = jax.random.split(jax.random.key(6), 4000)
    logits = jnp.broadcast_to(jax.random.normal(jax.random.key(7), (400,)), (4000, 400))
    inside = np.isfinite(np.asarray(truncate(logits[:1], 0, np.float32(0.2))))[0]
    for sampler in ("gumbel", "inverse_cdf"):
        tokens, logprob = sample(logits, keys, Sampling(1.0, 0, np.float32(0.2)), sampler)
        assert inside[np.asarray(tokens)].all() and np.isfinite(logprob).all()
        assert len(set(np.asarray(tokens).tolist())) == inside.sum()
