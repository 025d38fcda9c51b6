"""A small word-level tokenizer for the synthetic world: one token a word, name or tag.

Its vocabulary depends on the fixed name pools and sentence templates alone, never on a seed, so model shapes are the
same for every world. A token may carry the space before it, and concatenating token strings gives the text back.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cipo_jax.data.demonstration_texts import ALL_TEXTS as DEMONSTRATION_TEXTS
from cipo_jax.data.names import ALL_NAMES
from cipo_jax.data.world import HEARSAY, QUERY, QUESTIONS, STATEMENTS
from cipo_jax.errors import UserError
from cipo_jax.protocols import search_r1

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY_MULTIPLE = 64

# Tags, words and numbers, then any other mark; each with the space before it, if any.
_PIECE = r" ?</?[a-z_]+>| ?[A-Za-z0-9]+|\n\n|\n| ?[^\sA-Za-z0-9]|\s"

_MARKS = tuple("!\"'()*,-./:;<=>?[]_{}")
_NUMBERS = tuple(str(number) for number in range(11))
# A few words beyond the templates', for prompts and probes of one's own.
_WORDS = "Also Then Therefore So a all also as but fact first last not now one passage second should so then was with"


def pieces(text: str) -> list[str]:
    """Splits text into the pieces that become tokens; they concatenate to the text."""
    return re.findall(_PIECE, text)


def vocabulary() -> list[str]:
    """Every token in id order: pad, eos, unk, white space, tags, marks, words, names, then unused padding.

    Everything but white space appears with and without a leading space.
    """
    tokens = [PAD, EOS, UNK, "\n", "\n\n", " "]
    bare = [*search_r1.TAGS, *_MARKS, *_NUMBERS]
    words = set(_WORDS.split())
    for text in _template_texts():
        words |= {piece.strip() for piece in pieces(text) if piece.strip().isalpha()}
    bare += sorted(words | {word.lower() for word in words})
    bare += sorted(ALL_NAMES)
    for token in bare:
        tokens += [token, " " + token]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % VOCABULARY_MULTIPLE)]
    return tokens


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer; the same object, token for token, on every call."""
    tokens = vocabulary()
    inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )


def save_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer and saves it as a folder that `AutoTokenizer.from_pretrained` loads."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer from a local folder, this one or any other fast tokenizer.

    Raises:
      UserError: if the folder holds none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder}: no tokenizer there ({reason}); give a folder that holds tokenizer.json.") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{folder}: holds a slow tokenizer; give a folder that holds tokenizer.json.")
    return tokenizer


def model_tokenizer(model: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model: `tokenizer.json` beside its weights, else the one inside its `.gguf` file.

    Raises:
      UserError: there is neither.
    """
    model = Path(model)
    folder = model if model.is_dir() else model.parent
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    files = [model] if model.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if not files:
        raise UserError(f"{folder} holds no tokenizer.json and no .gguf file; name the folder of a model.")
    from cipo_jax.data.gguf_tokenizer import gguf_tokenizer  # needs the package gguf

    return gguf_tokenizer(files[0])


def _template_texts() -> Iterable[str]:
    yield from (*QUESTIONS.values(), *STATEMENTS.values(), HEARSAY, QUERY, *DEMONSTRATION_TEXTS)
    yield from (search_r1.INSTRUCTION, *search_r1.CORRECTIONS.values(), search_r1.NOTHING_FOUND, search_r1.LINE)
