"""The decoder against transformers' models run here and now: logits, gradients, and what an export gives them."""

import decoding
import numpy as np
import pytest
import random_checkpoints as checkpoints
import reference

from cipo_jax.models.export import export_decoder


@pytest.fixture(scope="module", params=checkpoints.CONFIGS)
def case(request, tmp_path_factory):
    folder = checkpoints.write(tmp_path_factory.mktemp(request.param), checkpoints.CONFIGS[request.param])
    return decoding.load(folder), reference.load(folder)


def test_logits_at_every_length(case):
    loaded, model = case
    longest = max(checkpoints.LENGTHS)
    for n in checkpoints.LENGTHS:
        tokens = checkpoints.tokens(n)
        want = reference.logits(model, tokens)
        padded = np.pad(tokens, ((0, 0), (0, longest - n)))
        got = decoding.full(loaded, padded, np.array([n, n]))[:, :n]
        assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max(), n


def test_logits_of_a_batch_with_padding(case):
    loaded, model = case
    tokens, lengths = checkpoints.tokens(65, 3), [65, 64, 7]
    want, got = reference.logits(model, tokens, lengths), decoding.full(loaded, tokens, np.array(lengths))
    for row, n in enumerate(lengths):
        assert np.abs(got[row, :n] - want[row, :n]).max() <= 1e-4 * np.abs(want).max()


def test_gradients(case):
    loaded, model = case
    tokens = checkpoints.tokens(130)
    loss, gradients = decoding.loss_and_gradients(loaded, tokens)
    want_loss, want = reference.loss_gradients(model, tokens)
    assert abs(loss - want_loss) <= 1e-5 * want_loss
    assert set(want) == set(gradients)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient - want[name]) <= 1e-3 * np.linalg.norm(want[name]), name


def test_transformers_opens_an_export_and_computes_the_same(case, tmp_path):
    loaded, model = case
    export_decoder(tmp_path / "kept", loaded.config, loaded.params, loaded.checkpoint)
    export_decoder(tmp_path / "fresh", loaded.config, loaded.params)
    tokens = checkpoints.tokens(65)
    want = reference.logits(model, tokens)
    for folder in ("kept", "fresh"):
        assert np.array_equal(reference.logits(reference.load(tmp_path / folder), tokens), want), folder
