"""The automaton finds exactly what a text search finds, on the same token."""

import numpy as np
import pytest
from tiny_world import WORDS, tiny_tokenizer
from transformers import AutoTokenizer

from cipo_jax.rollout.stops import compile_stops, token_bytes

STOPS = ("</search>", "</answer>")


def first_stop(pieces, stops):
    """(token number, 1 + stop) of the first completed stop by plain search, or None."""
    text = b""
    for i, piece in enumerate(pieces):
        text += piece
        ends = [(text.find(s.encode()) + len(s.encode()), n) for n, s in enumerate(stops, 1) if s.encode() in text]
        if ends:
            return i, min(ends)[1]
    return None


def run(table, ids):
    state = 0
    for i, token in enumerate(ids):
        found = int(table.found[token, state])
        if found:
            return i, found
        state = int(table.next_state[token, state])
    return None


def test_every_token_of_the_tiny_vocabulary_in_every_state():
    vocabulary = token_bytes(tiny_tokenizer(), len(WORDS) + 1)
    assert vocabulary[WORDS.index("</search> x")] == b"</search> x" and vocabulary[-1] == b""
    table = compile_stops(STOPS, vocabulary)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(3000):
        ids = rng.integers(0, len(WORDS), 12).tolist()
        want = first_stop([vocabulary[i] for i in ids], STOPS)
        assert run(table, ids) == want
        hits += want is not None
    assert 500 < hits < 3000


def test_overlapping_and_nested_stops():
    vocabulary = [bytes([b]) for b in range(256)]
    stops = ("abab", "bab", "abc", "é")
    table = compile_stops(stops, vocabulary)
    rng = np.random.default_rng(1)
    for _ in range(2000):
        ids = rng.choice([97, 98, 99, 0xC3, 0xA9], 10).tolist()
        assert run(table, ids) == first_stop([vocabulary[i] for i in ids], stops)


def test_real_tokenizer_on_random_splits(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / "qwen3")
    vocabulary = token_bytes(tokenizer, 151936)
    table = compile_stops(STOPS, vocabulary)
    by_bytes = {}
    for number, data in enumerate(vocabulary):
        by_bytes.setdefault(data, number)
    longest = max(map(len, by_bytes))
    rng = np.random.default_rng(2)
    texts = [
        "<think> é中 </think><search> who is it </search>\n", "a</search></answer>", "x</sear</search>.", "</answer>>",
        "<answer>\n42</answer>\n\n", "nothing here </sea rch>", "</</search", "<search>q</search><|im_end|>",
    ]  # fmt: skip
    for trial in range(20_000):
        data, ids = texts[trial % len(texts)].encode(), []
        while data:
            for size in rng.permutation(min(len(data), longest)) + 1:
                if data[:size] in by_bytes:
                    ids.append(by_bytes[data[:size]])
                    data = data[size:]
                    break
        assert run(table, ids) == first_stop([vocabulary[i] for i in ids], STOPS)


def test_token_bytes_of_the_real_tokenizer_concatenate_to_the_text(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "tokenizers" / "qwen3")
    vocabulary = token_bytes(tokenizer, 151936)
    text = "Straße 中文 <|im_start|>user\n</search>  \t é"
    assert b"".join(vocabulary[i] for i in tokenizer(text)["input_ids"]) == text.encode()


def test_empty_stops_are_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        compile_stops(("",), [b"a"])
