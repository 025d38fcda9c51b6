"""Stop strings found on the exact token, inside the compiled loop.

The stop strings become one Aho-Corasick automaton over bytes, compiled with the tokenizer's vocabulary to a table
`[vocab, states]`. A stop split over several tokens, or inside one token with text behind it, is found like any other.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


def token_bytes(tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each id of a fast tokenizer stands for; empty for ids without a token.

    Raises:
      ValueError: the tokenizer holds more ids than `vocab_size`.
    """
    import json

    vocabulary = tokenizer.get_vocab()
    if vocabulary and max(vocabulary.values()) >= vocab_size:
        raise ValueError(f"the tokenizer has ids up to {max(vocabulary.values())}, the model only {vocab_size}")
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {})
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    alphabet = {char: byte for byte, char in _byte_level_alphabet().items()} if "ByteLevel" in decoder else None
    out = [b""] * vocab_size
    for token, number in vocabulary.items():
        if alphabet is not None and token not in added:
            out[number] = bytes(alphabet[c] for c in token)
        elif '"ByteFallback"' in decoder and len(token) == 6 and token.startswith("<0x"):
            out[number] = bytes([int(token[3:5], 16)])
        else:
            out[number] = (token.replace("\u2581", " ") if "\u2581" in decoder else token).encode()
    return out


def _byte_level_alphabet() -> dict[int, str]:
    """The printable stand-in of every byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@dataclasses.dataclass(frozen=True)
class StopTable:
    """The compiled automaton. State 0 is the start.

    Attributes:
      next_state: `[V, states]` int16, the state after a token.
      found: `[V, states]` int8, 1 + the index of the first stop string that a token completes, else 0.
    """

    next_state: np.ndarray
    found: np.ndarray


def compile_stops(stops: Sequence[str], vocabulary: Sequence[bytes]) -> StopTable:
    """Compiles stop strings for a vocabulary given as the bytes of each id.

    Raises:
      ValueError: an empty stop string.
    """
    if any(not stop for stop in stops):
        raise ValueError(f"stop strings must not be empty: {list(stops)}")
    step, ends = _automaton([stop.encode() for stop in stops])
    states = len(ends)
    longest = max((len(b) for b in vocabulary), default=0)
    padded = np.full((len(vocabulary), longest), -1, np.int16)
    for i, data in enumerate(vocabulary):
        padded[i, : len(data)] = np.frombuffer(data, np.uint8)
    state = np.broadcast_to(np.arange(states, dtype=np.int16), (len(vocabulary), states)).copy()
    found = np.zeros(state.shape, np.int8)
    for column in padded.T:
        live = np.flatnonzero(column >= 0)
        moved = step[state[live], column[live, None]]
        state[live] = moved
        found[live] = np.where(found[live] == 0, ends[moved], found[live])
    return StopTable(state, found)


def _automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Transitions `[states, 256]` and, per state, 1 + the index of the pattern that ends there (0: none)."""
    children: list[dict[int, int]] = [{}]
    ends = [0]
    for number, pattern in enumerate(patterns):
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(0)
            node = children[node][byte]
        ends[node] = ends[node] or number + 1
    step = np.zeros((len(children), 256), np.int16)
    fallback, queue = [0] * len(children), [0]
    for node in queue:  # breadth first: a node's fallback is shallower and already complete
        step[node] = step[fallback[node]] if node else 0
        ends[node] = ends[node] or ends[fallback[node]]
        for byte, child in children[node].items():
            fallback[child] = int(step[node, byte])
            step[node, byte] = child
            queue.append(child)
    return step, np.asarray(ends, np.int8)
