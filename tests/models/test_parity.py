"""Every architecture against transformers' logits and gradients (golden files), and cached decoding against both.

`make_golden.py` wrote the golden files with torch; `tests/parity` compares live where torch is installed.
"""

import decoding
import numpy as np
import pytest
import random_checkpoints as checkpoints
from random_checkpoints import GRADIENT_LENGTH, places, sampled

LENGTHS = checkpoints.LENGTHS
LONGEST = max(LENGTHS)
ROWS = [(n, row) for n in LENGTHS for row in range(2)]


@pytest.fixture(scope="module", params=checkpoints.CONFIGS)
def case(request, tmp_path_factory):
    folder = checkpoints.write(tmp_path_factory.mktemp(request.param), checkpoints.CONFIGS[request.param])
    golden = np.load(decoding.Path(__file__).parent / "golden" / f"decoder_{request.param}.npz")
    return decoding.load(folder), golden


@pytest.fixture(scope="module")
def padded():
    """All lengths as one batch, with random tokens as padding, which nothing may see."""
    batch = np.random.default_rng(0).integers(0, checkpoints.COMMON["vocab_size"], (len(ROWS), LONGEST))
    for at, (n, row) in enumerate(ROWS):
        batch[at, :n] = checkpoints.tokens(n)[row]
    return batch, np.array([n for n, _ in ROWS])


def worst(got, golden) -> float:
    """The largest difference to the golden logits, relative to the largest logit."""
    return max(
        np.abs(got[at, places(n)] - golden[f"logits_{n}"][row]).max() / golden[f"scale_{n}"]
        for at, (n, row) in enumerate(ROWS)
    )


def test_logits_equal_transformers_padded_or_not(case, padded):
    loaded, golden = case
    tokens, lengths = padded
    assert worst(decoding.full(loaded, tokens, lengths), golden) <= 1e-4
    alone = decoding.full(loaded, checkpoints.tokens(65))
    assert np.abs(alone[:, places(65)] - golden["logits_65"]).max() <= 1e-4 * golden["scale_65"]


@pytest.mark.parametrize("chunks", [[LONGEST], [64, 64, *[1] * 3, 64, 64]], ids=["one", "several"])
def test_cached_decoding_equals_transformers(case, padded, chunks):
    loaded, golden = case
    assert worst(decoding.cached(loaded, *padded, chunks), golden) <= 1e-4


def test_gradients_equal_transformers(case):
    loaded, golden = case
    loss, gradients = decoding.loss_and_gradients(loaded, checkpoints.tokens(GRADIENT_LENGTH))
    assert abs(loss - golden["loss"]) <= 1e-5 * golden["loss"]
    names = {name.removeprefix("grad/") for name in golden.files if name.startswith("grad/")}
    assert names == set(gradients)
    for name, gradient in gradients.items():
        got, want = sampled(gradient), golden[f"grad/{name}"]
        assert abs(got[-1] - want[-1]) <= 1e-3 * want[-1], name
        np.testing.assert_allclose(got[:-1], want[:-1], rtol=1e-3, atol=1e-3 * np.abs(gradient).max(), err_msg=name)
