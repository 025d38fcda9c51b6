"""What every protocol offers: how an agent is prompted, parsed and answered. No jax, no models."""

from __future__ import annotations

import abc
import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cipo_jax.retrieval.retriever import Passage

# Reasons for a correction.
INVALID_ACTION = "invalid_action"  # the action held neither a search nor an answer that can be read
RETRIEVAL_FAILED = "retrieval_failed"  # the search was fine, the retriever was not

# Common end-of-turn tokens; those a tokenizer lacks are skipped.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")

_CACHED_ENCODINGS = 100_000


class ActionKind(enum.StrEnum):
    """What an action asks for."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclasses.dataclass(frozen=True)
class Action:
    """One parsed action.

    Attributes:
      kind: what it asks for.
      query: the stripped, non-empty query of a SEARCH, else None.
      answer: the stripped answer of an ANSWER (may be empty), else None.
      think: the stripped text of the first closed think block before the call, else None.
    """

    kind: ActionKind
    query: str | None = None
    answer: str | None = None
    think: str | None = None


@dataclasses.dataclass(frozen=True)
class Observation:
    """Tokens the environment writes after an action. Spans are `[start, end)` in `ids`.

    Attributes:
      ids: token ids, tags included.
      content: span of the passages' text without tags; `(0, 0)` when no passage is shown.
      passages: span of each passage shown; consecutive, and together exactly `content`.
      rows: the corpus row of each passage shown, aligned with `passages`.
    """

    ids: list[int]
    content: tuple[int, int] = (0, 0)
    passages: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def framed(
        cls,
        opening: list[int],
        passages: Sequence[tuple[int, Sequence[int]]],
        closing: list[int],
        budget: int,
    ) -> Observation:
        """Passages, as `(row, ids)`, between two tags in at most `budget` tokens.

        Passages that don't fit are dropped whole from the end. If not even the first fits it is cut by tokens; the
        closing tag is always kept. If the tags leave no room the observation holds the tags alone (content `(0, 0)`), and
        if not even those fit it is empty: the rollout then ends at its token limit.
        """
        room = budget - len(opening) - len(closing)
        if room < 0:
            return cls([])
        content: list[int] = []
        spans: list[tuple[int, int]] = []
        rows: list[int] = []
        for i, (row, ids) in enumerate(passages):
            if len(content) + len(ids) > room:
                if i > 0 or room == 0:
                    break
                ids = ids[:room]
            start = len(opening) + len(content)
            spans.append((start, start + len(ids)))
            rows.append(int(row))
            content += ids
            if len(content) == room:
                break
        span = (len(opening), len(opening) + len(content)) if content else (0, 0)
        return cls(opening + content + closing, span, spans, rows)


def closed_answer(text: str) -> str | None:
    """What the last closed `<answer>` block holds, stripped; the innermost where blocks nest; None without one."""
    answer, body = None, None
    for piece in re.split(r"(</?answer>)", text):
        if piece == "<answer>":
            body = ""
        elif piece == "</answer>":
            answer, body = (body, None) if body is not None else (answer, None)
        elif body is not None:
            body = piece
    return answer.strip() if answer is not None else None


class Protocol(abc.ABC):
    """How an agent talks: prompt, stop strings, actions, observations and format.

    Text that comes from outside (questions, passages) is encoded apart from the protocol's own tags and cannot forge
    them: see `neutralise`.

    Attributes:
      tokenizer: a transformers fast tokenizer.
      stop_strings: sampling stops on the token that completes one.
      terminal_stops: those of `stop_strings` that end the trajectory.
      end_of_turn_ids: sampled ids that end an action without a stop string.
      corrects_invalid: whether an action with neither call nor answer gets a corrective observation (True) or ends the
        rollout (False).
    """

    stop_strings: tuple[str, ...] = ()
    terminal_stops: tuple[str, ...] = ()
    corrects_invalid: bool = True
    control_strings: tuple[str, ...] = ()  # the protocol's own tags, which passages and questions may not contain

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        names = dict.fromkeys((tokenizer.eos_token, *END_OF_TURN_TOKENS))
        self.end_of_turn_ids: tuple[int, ...] = tuple(vocabulary[name] for name in names if name in vocabulary)
        # `all_special_tokens` lists only those with a role; chat marks may have none.
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {*self.control_strings, *tokenizer.all_special_tokens}
        forbidden = sorted(special, key=len, reverse=True)
        self._forbidden = re.compile("|".join(re.escape(text) for text in forbidden)) if forbidden else None
        self._encodings: dict[str, tuple[int, ...]] = {}

    @abc.abstractmethod
    def prompt_ids(self, question: str) -> list[int]:
        """Token ids of the prompt for a question; sampling starts behind the last one."""

    @abc.abstractmethod
    def parse_action(self, text: str) -> Action:
        """Reads the text of one action. Bytes behind the stop string are ignored; never raises on any text."""

    @abc.abstractmethod
    def observe(self, passages: Sequence[Passage], budget: int) -> Observation:
        """Writes passages as an observation of at most `budget` tokens; whole passages are cut from the end."""

    @abc.abstractmethod
    def correction(self, reason: str) -> Observation:
        """Writes an observation without passages for `INVALID_ACTION` or `RETRIEVAL_FAILED`; else ValueError."""

    @abc.abstractmethod
    def final_answer(self, text: str) -> str | None:
        """The last closed, non-empty answer in a response (never the prompt), else None."""

    @abc.abstractmethod
    def format_valid(self, text: str) -> bool:
        """Whether a whole response (all actions and observations) follows the protocol's grammar."""

    def encode(self, text: str) -> list[int]:
        """Token ids of one part of text, without added special tokens.

        Parts are encoded apart and their ids joined, so a part's ids never depend on its neighbours. Lone surrogates
        become `?`. Recent encodings are cached: observations repeat the same passages.
        """
        ids = self._encodings.get(text)
        if ids is None:
            clean = text.encode("utf-8", "replace").decode("utf-8")
            ids = tuple(self.tokenizer(clean, add_special_tokens=False)["input_ids"])
            if len(self._encodings) >= _CACHED_ENCODINGS:
                self._encodings.clear()
            self._encodings[text] = ids
        return list(ids)

    def encode_action(self, text: str) -> list[int]:
        """Token ids of one demonstrated action, ended the way a sampled one ends.

        An action that completes no stop string can only have ended with an end-of-turn token, so that one is added
        (where the tokenizer has any).
        """
        ids = self.encode(text)
        if not any(stop in text for stop in self.stop_strings):
            ids += self.end_of_turn_ids[:1]
        return ids

    def neutralise(self, text: str) -> str:
        """Replaces the protocol's tags and the tokenizer's special tokens in outside text by a space (our choice).

        Otherwise a passage that holds `</information><answer>..` or `<|im_end|>` could speak for the agent.
        """
        return self._forbidden.sub(" ", text) if self._forbidden else text
