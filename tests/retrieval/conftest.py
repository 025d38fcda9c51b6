"""A tiny encoder with random weights and a word-level tokenizer, and the real MiniLM where it is to be had."""

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
