"""The peers of the rollout benchmark do what they are said to do."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cipo_jax.benchmarks.rollout_job import Job  # noqa: E402
from cipo_jax.benchmarks.rollout_torch import CACHES, Transformers  # noqa: E402

JOB = Job(shape="tiny", rollouts=8, slots=4, group=2, prompt=16, observation=16, action=8.0, keys=32)


@pytest.mark.parametrize("cache", CACHES)
@torch.inference_mode()
def test_cached_turns_equal_forwards_of_the_bare_rows(cache):
    """Greedy tokens of all turns, without what is left behind by rows that ended early."""
    peer = Transformers(JOB)
    peer.cache, peer.sample = cache, False
    steps, ids, mask = peer.cached(1)
    lengths = JOB.lengths[4:]
    assert steps == lengths.max(0).sum()
    for row, (tokens, kept) in enumerate(zip(ids, mask.bool(), strict=True)):
        bare = tokens[kept]
        assert len(bare) == 16 + 3 * 16 + lengths[row].sum()
        likeliest = peer.model(bare[None]).logits[0].argmax(-1)
        at = 16
        for count in lengths[row]:
            assert (bare[at : at + count] == likeliest[at - 1 : at + count - 1]).all()
            at += count + 16


def test_reencoding_and_decoding_take_the_steps_they_must():
    peer = Transformers(JOB)
    rows = JOB.batches(2)[1]
    assert peer.reencode(2, 1) == JOB.lengths[rows, 2].max()
    assert peer.decode() == 24
    assert np.isfinite(list(peer.choose().values())).all()
