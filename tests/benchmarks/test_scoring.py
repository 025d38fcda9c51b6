"""The benchmark of scoring measures what it says it does."""

import numpy as np
import pytest

from cipo_jax.benchmarks import scoring
from cipo_jax.models.config import DELTA_CHUNK, DecoderConfig
from cipo_jax.scoring.counterfactuals import Masked, Removed, Several
from cipo_jax.scoring.packing import places_needed
from cipo_jax.types import Role


@pytest.mark.parametrize("sigma", [0.0, 0.8])
def test_trajectories_have_the_stated_shape(sigma):
    t = scoring.trajectories(3, sigma)
    assert t.tokens.shape == (3, 2048) and (t.length == 2048).all()
    assert ((t.evidence_span[..., 1] - t.evidence_span[..., 0])[:, :4] == 300).all()
    lengths = t.action_span[..., 1] - t.action_span[..., 0]
    assert np.abs(lengths.mean(1) - 120).max() < 1 and (lengths.std(1) > 0).all() == (sigma > 0)
    assert (t.action_mask.sum(1) == lengths.sum(1)).all()
    for b in range(3):  # spans lie behind each other, and end the row
        ends = [e for turn in range(4) for e in (*t.action_span[b, turn], *t.evidence_span[b, turn])]
        ends += t.action_span[b, 4].tolist()
        assert ends == sorted(ends) and ends[-1] == 2048
        assert (t.role[b, : ends[0]] == Role.PROMPT).all()
        assert (t.content_span[b, 0] == t.evidence_span[b, 0] + np.asarray([4, -4])).all()
    assert (t.passage_span[:, :4, 0, 0] == t.content_span[:, :4, 0]).all()
    assert (t.passage_span[:, :4, -1, 1] == t.content_span[:, :4, 1]).all()


def test_masked_copies_cost_the_closing_tag_and_the_action():
    t = scoring.trajectories(1)
    copies = Masked().copies(t, 0)
    assert [len(c) for c in copies] == [4 + 119] * 4
    assert places_needed(copies, [0] * 4) == 3 * 128 + 4 + 119  # each at the border of a tile
    assert places_needed(copies, [0] * 4, DELTA_CHUNK) == 4 * 128
    assert len(Several([Masked(), Removed()]).copies(t, 0)) == 8


def test_every_row_is_timed_against_the_visible_forward():
    layout = scoring.Layout(length=256, evidence=24, action=10)
    config = DecoderConfig(vocab_size=8192, width=16, depth=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    table = scoring.measure(scoring.Bench(config, 1, 64, 1, layout), everything=False)
    assert set(table) == {"visible_masked", "visible_masked_removed"}
    assert [row["copied_places"] for row in table.values()] == [64, 128]
    assert all(row["ratio"] > 0 and row["seconds"] > 0 for row in table.values())
