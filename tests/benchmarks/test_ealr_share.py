"""The shares are those of the parts that were measured."""

import pytest

from cipo_jax.benchmarks.ealr_share import Parts, Step, shares
from cipo_jax.benchmarks.scoring import Layout
from cipo_jax.models.config import DecoderConfig

STEP = Step(
    DecoderConfig(64, width=16, depth=1, heads=2, kv_heads=1, head_dim=8, ffn=16),
    Layout(length=40, turns=2, evidence=8, action=6, tag=1, vocab=64), places=48, group=4, rows=2, chunk=8,
)  # fmt: skip


def test_every_part_is_timed():
    parts = Parts(STEP, 1).measure()
    assert set(parts) == {"decode", "extend", "visible", "visible_masked", "copied_places", "update"}
    assert all(value > 0 for value in parts.values())
    assert parts["copied_places"] == 16  # two copies of a closing tag and five tokens, in sixteens
    assert shares(STEP, parts)["step"] > 0


def test_shares_by_hand():
    parts = {"decode": 0.5, "extend": 2.0, "visible": 3.0, "visible_masked": 4.0, "update": 10.0}
    found = shares(STEP, parts)
    # 18 decoded tokens; two blocks of evidence, and a prompt of 6 tokens shared by 4 rows; 2 batches of 2 rows
    assert found["rollout"] == pytest.approx(18 * 0.5 + (2 + 1 / 4) * 2.0)
    assert found["step"] == pytest.approx(found["rollout"] + 2 * (3 + 4 + 10))
    assert found["masked_share"] == pytest.approx(2 / found["step"])
    assert found["scoring_share"] == pytest.approx(8 / found["step"])
