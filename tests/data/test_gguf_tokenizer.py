"""A GGUF file's tokenizer, built without torch."""

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from cipo_jax.data.gguf_tokenizer import gguf_tokenizer
from cipo_jax.errors import UserError

TEXTS = ("I don't know 1234 things.", "Ünï 日本\n\n  x\t<|end|>y", "<|end|>", "")


def write(path, pre="smollm", kind="gpt2"):
    """A file with a byte-level vocabulary, a few merges and a special token, but no weights."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["o n", "d on", "k n", "Ġ t", "h i", "1 2", "12 34", "3 4", "Ċ Ċ"]
    tokens = ["<|end|>", *letters, *dict.fromkeys(m.replace(" ", "") for m in merges)]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tokens


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_text_survives_and_merges_stay_inside_pieces(tmp_path, pre):
    path, tokens = write(tmp_path / "m.gguf", pre)
    tokenizer = gguf_tokenizer(path)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == (
        "<|end|>",
        "<|end|>",
        "{{ messages }}",
    )
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert ids.count(0) == text.count("<|end|>")
    numbers = [tokens[i] for i in tokenizer("1234")["input_ids"]]
    # Single digits, runs of three, or whatever merges.
    single = ["1", "2", "3", "4"]
    assert numbers == {"smollm": single, "qwen2": single, "llama-bpe": ["12", "3", "4"], "gpt-2": ["1234"]}[pre]


def test_another_kind_is_refused(tmp_path):
    path, _ = write(tmp_path / "m.gguf", kind="llama")
    with pytest.raises(UserError, match="--tokenizer"):
        gguf_tokenizer(path)
