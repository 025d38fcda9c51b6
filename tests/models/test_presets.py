"""The shipped model parts are the published models."""

import gin
import pytest

from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import abstract_decoder, parameter_count
from cipo_jax.models.hf_config import decoder_config, hf_config, model_type

# Parameters in millions, embedding once when tied; model cards and config.json files.
PUBLISHED = {
    "qwen2_5_0_5b": ("qwen2", 494.0),
    "qwen2_5_1_5b": ("qwen2", 1543.7),
    "qwen2_5_3b": ("qwen2", 3085.9),
    "qwen2_5_7b": ("qwen2", 7615.6),
    "qwen3_0_6b": ("qwen3", 596.0),
    "qwen3_1_7b": ("qwen3", 1720.6),
    "qwen3_4b": ("qwen3", 4022.5),
    "qwen3_8b": ("qwen3", 8190.7),
    "qwen3_5_0_8b": ("qwen3_5_text", 752),
    "qwen3_5_2b": ("qwen3_5_text", 1882),
    "qwen3_5_4b": ("qwen3_5_text", 4206),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset(name, repository, clean_gin):
    gin.parse_config_file(str(repository / "configs" / "models" / f"{name}.gin"))
    config = DecoderConfig()
    kind, millions = PUBLISHED[name]
    assert model_type(config) == kind
    assert parameter_count(abstract_decoder(config)[1]) / 1e6 == pytest.approx(millions, rel=1e-3)
    written = hf_config(config)
    clean_gin.clear_config()
    assert decoder_config(written) == config


def test_every_shipped_preset_is_checked(repository):
    shipped = {path.stem for path in (repository / "configs" / "models").glob("qwen*.gin")}
    assert shipped == set(PUBLISHED)
