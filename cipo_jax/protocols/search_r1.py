"""Search-R1's protocol: `<think> <search> <information> <answer>` in plain text (PeterGriffinJin/Search-R1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gin

from cipo_jax.errors import UserError
from cipo_jax.protocols.base import (
    INVALID_ACTION,
    RETRIEVAL_FAILED,
    Action,
    ActionKind,
    Observation,
    Protocol,
    closed_answer,
)

if TYPE_CHECKING:
    from cipo_jax.retrieval.retriever import Passage

INSTRUCTION = (
    "Answer the question below. Reason between <think> and </think> first, and again whenever you have received new "
    "information. If you lack some knowledge, call the search engine with <search> query </search>; what it finds is "
    "shown between <information> and </information>. Search as often as you need. Once nothing more is missing, give "
    "only the answer, without explanation, between <answer> and </answer>, for example <answer> Lisbon </answer>. "
    "Question: {question}\n"
)

# The environment's own lines. None holds a tag: a closed answer tag in one would be read as the agent's answer.
CORRECTIONS = {
    INVALID_ACTION: "\n\nNo search query or answer was found. Write one of them inside its tags.\n\n",
    RETRIEVAL_FAILED: "The search failed.",
}
LINE = "Doc {number}(Title: {title}) {text}"
NOTHING_FOUND = "No passage was found."

TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/"))
_TAG = re.compile(f"({'|'.join(TAGS)})")
_CALL = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)

# Grammar of a response as (state, tag) -> state. Text is free inside a block and white space between blocks.
_GRAMMAR = {
    ("start", "<think>"): "in_think",
    ("in_think", "</think>"): "thought",
    ("thought", "<search>"): "in_search",
    ("in_search", "</search>"): "searched",
    ("searched", "<information>"): "in_information",
    ("in_information", "</information>"): "start",
    ("thought", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}


@gin.configurable
class SearchR1(Protocol):
    """The Search-R1 agent: one search or answer per action, passages as `Doc i(Title: T) text` lines.

    An action stops at `</search>` or `</answer>`; an action with neither gets a short corrective observation.
    Differences from the public code, both on purpose: an observation is cut by passage and never through its closing
    tag, and an action whose query holds a protocol tag is invalid instead of being searched literally.

    Args:
      tokenizer: a transformers fast tokenizer.
      instruction: the prompt, with `{question}` where the question goes. The wording is ours.
      use_chat_template: whether the prompt is rendered as a user message of the tokenizer's chat template, followed by
        its generation prompt; False feeds the plain text.
      enable_thinking: passed to the chat template; templates that don't know it ignore it.

    Raises:
      UserError: if the instruction lacks `{question}`, or a chat template is asked for and the tokenizer has none.
    """

    stop_strings = ("</search>", "</answer>")
    terminal_stops = ("</answer>",)
    corrects_invalid = True
    control_strings = TAGS

    def __init__(
        self,
        tokenizer: Any,
        instruction: str = INSTRUCTION,
        use_chat_template: bool = False,
        enable_thinking: bool = True,
    ):
        super().__init__(tokenizer)
        if "{question}" not in instruction:
            raise UserError(f"SearchR1.instruction={instruction!r} lacks {{question}}; put it where the question goes.")
        if use_chat_template and not tokenizer.chat_template:
            raise UserError(
                f"SearchR1.use_chat_template=True but tokenizer {tokenizer.name_or_path!r} has no chat template; "
                "set it to False or use a tokenizer that has one."
            )
        self.instruction = instruction
        self.use_chat_template = use_chat_template
        self.enable_thinking = enable_thinking
        self._opening = self.encode("\n\n<information>")
        self._closing = self.encode("</information>\n\n")

    def prompt_text(self, question: str) -> str:
        """The prompt as text; tags and special tokens inside the question are neutralised."""
        message = self.instruction.replace("{question}", self.neutralise(question))
        if not self.use_chat_template:
            return message
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=self.enable_thinking,
        )

    def prompt_ids(self, question: str) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.encode(self.prompt_text(question))

    def parse_action(self, text: str) -> Action:
        """Reads the first closed search or answer block; what follows it is ignored.

        INVALID: no closed block, an empty query, or a protocol tag inside the block. An empty answer is an ANSWER with
        `answer=""`: it ends the trajectory, but `final_answer` gives None for it.
        """
        call = _CALL.search(text)
        think = _THINK.search(text, 0, call.start() if call else len(text))
        thought = think[1].strip() if think else None
        if call is None or _TAG.search(call[2]):
            return Action(ActionKind.INVALID, think=thought)
        body = call[2].strip()
        if call[1] == "answer":
            return Action(ActionKind.ANSWER, answer=body, think=thought)
        if not body:
            return Action(ActionKind.INVALID, think=thought)
        return Action(ActionKind.SEARCH, query=body, think=thought)

    def observe(self, passages: Sequence[Passage], budget: int) -> Observation:
        """Writes `\\n\\n<information>Doc 1(Title: T) text\\nDoc 2(..)..</information>\\n\\n`.

        Passages are cut to the budget as `Observation.framed` does. With no passages at all a short line says so. A
        passage's span starts with the line break that parts it from its predecessor.
        """
        if not passages:
            return self._remark(NOTHING_FOUND, budget)
        lines = (LINE.format(number=i + 1, title=p.title, text=p.text) for i, p in enumerate(passages))
        pieces = [self.encode("\n" * (i > 0) + self.neutralise(line)) for i, line in enumerate(lines)]
        rows = [passage.row for passage in passages]
        return Observation.framed(self._opening, list(zip(rows, pieces)), self._closing, budget)

    def correction(self, reason: str) -> Observation:
        """A remark of the environment: bare text for an invalid action, inside information tags for a failed search."""
        if reason not in CORRECTIONS:
            raise ValueError(f"unknown reason {reason!r}; one of {sorted(CORRECTIONS)}")
        if reason == INVALID_ACTION:
            return Observation(self.encode(CORRECTIONS[reason]))
        return self._remark(CORRECTIONS[reason])

    def final_answer(self, text: str) -> str | None:
        """The last closed answer, stripped; the innermost where answers nest; None if there is none or it is empty."""
        return closed_answer(text) or None

    def format_valid(self, text: str) -> bool:
        """Search-R1's sequence rule: (think, search, information)*, think, answer.

        Only white space may stand between blocks and no tag inside one; zero searches are valid. Text without tags
        behind `</answer>` is ignored, as everywhere. An empty query or answer is invalid (our choice: neither can be
        acted on).
        """
        state = "start"
        for piece in _TAG.split(text):
            if _TAG.fullmatch(piece):
                state = _GRAMMAR.get((state, piece), "invalid")
                if state == "invalid":
                    return False
            elif state in ("in_search", "in_answer"):
                if not piece.strip():
                    return False
            elif state in ("start", "thought", "searched") and piece.strip():
                return False
        return state == "end"

    def _remark(self, text: str, budget: int | None = None) -> Observation:
        ids = self._opening + self.encode(text) + self._closing
        if budget is not None and len(ids) > budget:
            return Observation.framed(self._opening, [], self._closing, budget)
        return Observation(ids)
