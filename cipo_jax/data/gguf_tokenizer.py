"""The byte-level BPE tokenizer inside a GGUF file, without torch (transformers reads GGUF files only with it)."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cipo_jax.errors import UserError

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names of pre-tokenizers; the numbers of digits that stay together differ.
_PRE = {"smollm": None, "gpt-2": None, "qwen2": "", "qwen35": "", "llama-bpe": "{1,3}"}
_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its special tokens and chat template.

    Raises:
      UserError: it is of a kind that is not read here; save the model's own tokenizer folder then.
    """
    from cipo_jax.models.gguf_files import GGUFCheckpoint

    file = GGUFCheckpoint(path)
    kind, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE:
        raise UserError(f"{path}: its tokenizer is {kind}/{pre}, which is not read here; give --tokenizer=FOLDER.")
    tokens, merges = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.merges")
    inner = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    )
    digits = _PRE[pre]
    if digits is None:
        split = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        split = [
            pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if pre.startswith("qwen"):
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    types = file.field("tokenizer.ggml.token_type")
    marked = [(t, kind) for t, kind in zip(tokens, types) if kind in (_CONTROL, _USER_DEFINED)]
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in marked if kind == _CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, kind in marked if kind == _USER_DEFINED])

    def token(name: str) -> str | None:
        number = file.field(f"tokenizer.ggml.{name}_token_id")
        return None if number is None else tokens[number]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=token("eos"),
        bos_token=token("bos"),
        pad_token=token("padding") or token("eos"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = file.field("tokenizer.chat_template")
    return tokenizer
