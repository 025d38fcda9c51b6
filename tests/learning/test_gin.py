"""Every choice a run makes in this package can be made in gin."""

import dataclasses

import gin
import pytest

from cipo_jax.learning.advantages import AdvantageConfig
from cipo_jax.learning.gspo import GspoObjective
from cipo_jax.learning.objective import ClippedObjective, SupervisedObjective
from cipo_jax.learning.state import adamw
from cipo_jax.rewards.evidence import EvidenceConfig


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def test_bindings_reach_the_objects():
    gin.parse_config("""
        AdvantageConfig.ealr_norm = "group"
        ClippedObjective.clip_high = 0.28
        GspoObjective.kl_weight = 0.0
        SupervisedObjective.aggregation = "seq_mean_token_mean"
        EvidenceConfig.ealr_gate = "drop"
        adamw.learning_rate = 5e-7
    """)
    assert AdvantageConfig().ealr_norm == "group"
    assert ClippedObjective().clip_high == 0.28 and ClippedObjective(clip_high=0.2).clip_high == 0.2
    assert GspoObjective().kl_weight == 0.0 and GspoObjective().clip_high == 4e-4
    assert SupervisedObjective().aggregation == "seq_mean_token_mean"
    assert EvidenceConfig().ealr_gate == "drop"
    assert adamw().learning_rate == 5e-7


def test_replace_keeps_what_gin_bound():
    gin.parse_config("AdvantageConfig.gamma = 0.5\nAdvantageConfig.leave_one_out = True")
    config = dataclasses.replace(AdvantageConfig(), gamma=0.9)
    assert (config.gamma, config.leave_one_out) == (0.9, True)


def test_a_misspelt_name_is_an_error():
    with pytest.raises(ValueError, match="clip_hihg"):
        gin.parse_config("ClippedObjective.clip_hihg = 0.28")
