"""Native tool calls of Qwen3 and Qwen3.5: `<tool_call>` out, `<tool_response>` in, the final answer in `<answer>`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gin
import jinja2

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
    "Answer the question; search for what you do not know. Give the final answer alone, in a few words, between "
    "<answer> and </answer>.\nQuestion: {question}"
)
FUNCTION, PARAMETER = "search", "query"
SCHEMA = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Finds passages of an encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {PARAMETER: {"type": "string", "description": "What to look for."}},
            "required": [PARAMETER],
        },
    },
}
# The environment's own lines; none holds a tag.
CORRECTIONS = {
    INVALID_ACTION: f"The call could not be read: write one call of {FUNCTION} with one non-empty {PARAMETER}.",
    RETRIEVAL_FAILED: "The search failed.",
}
NOTHING_FOUND = "No passage was found."

TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "tool_call", "tool_response", "answer") for slash in ("", "/"))
_TAG = re.compile("|".join(TAGS))
_MARK = re.compile(r"(<function=[^>\n]*>|</function>|<parameter=[^>\n]*>|</parameter>)")


def read_call(body: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the one call between the `tool_call` tags, in Qwen3.5's nested tags or in Qwen3's JSON.

    None for whatever is not exactly one call: junk around it, two calls, nested tags, an argument named twice.
    """
    body = body.strip()
    if _TAG.search(body):
        return None
    if body.startswith("{"):
        try:
            call = json.loads(body, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            return None
        name, arguments = call.get("name"), call.get("arguments")
        return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
    texts, marks = _MARK.split(body)[::2], _MARK.findall(body)
    if len(marks) % 2 or len(marks) < 2 or not marks[0].startswith("<function=") or marks[-1] != "</function>":
        return None
    opens, closes, values = marks[1:-1:2], marks[2:-1:2], texts[2:-2:2]
    between = [texts[0], *texts[1:-1:2], texts[-1]]
    if any(text.strip() for text in between) or any(mark != "</parameter>" for mark in closes):
        return None
    names = [mark[len("<parameter=") : -1].strip() if mark.startswith("<parameter=") else "" for mark in opens]
    if not all(names) or len(set(names)) < len(names):
        return None
    return marks[0][len("<function=") : -1].strip(), {name: value.strip() for name, value in zip(names, values)}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


@gin.configurable
class QwenTools(Protocol):
    """The search agent of arXiv 2609.28765: tool calls in the model's own chat template.

    The template renders the prompt (tools, one user message, generation header) and, once, a conversation with marked
    places, from which the text around tool responses is cut. Turns are appended as ids and never rendered again: templates
    drop earlier thinking when they re-render.

    An action stops at `</tool_call>`, `</answer>` or an end-of-turn token. With neither call nor answer the rollout ends
    (published). Our choices: a call that cannot be read is answered by an error in a tool response; both of Qwen's call
    forms are read, whichever the template teaches; a call or answer inside an open think block counts, since sampling has
    stopped at it, and one inside a closed block does not.

    Args:
      tokenizer: a transformers fast tokenizer whose chat template renders tools.
      instruction: the user message, with `{question}` where the question goes. The wording is ours.
      enable_thinking: passed to the chat template (our choice: True); Qwen3.5's sizes differ in their default.

    Raises:
      UserError: the instruction lacks `{question}`, or the tokenizer has no chat template or one that does not render
        tools, `<tool_call>` or tool responses.
    """

    stop_strings = ("</tool_call>", "</answer>")
    terminal_stops = ("</answer>",)
    corrects_invalid = False
    control_strings = TAGS

    def __init__(self, tokenizer: Any, instruction: str = INSTRUCTION, enable_thinking: bool = True):
        super().__init__(tokenizer)
        if "{question}" not in instruction:
            raise UserError(
                f"QwenTools.instruction={instruction!r} lacks {{question}}; put it where the question goes."
            )
        if not tokenizer.chat_template:
            raise UserError(
                f"QwenTools needs a chat template and tokenizer {tokenizer.name_or_path!r} has none; use another tokenizer "
                "or protocol."
            )
        self.instruction, self.enable_thinking = instruction, enable_thinking
        self._opening, self._between, self._closing = (self.encode(text) for text in self._frame())

    def _frame(self) -> tuple[str, str, str]:
        """The text between a call and its first response, between two responses, and behind the last one."""
        query, first, second = "QUERY-PLACE", "FIRST-PLACE", "SECOND-PLACE"
        call = {"type": "function", "function": {"name": FUNCTION, "arguments": {PARAMETER: query}}}
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": FUNCTION, "content": first},
            {"role": "tool", "name": FUNCTION, "content": second},
        ]
        text = self._render(messages)
        parts = re.fullmatch(f"(.*){query}.*?</tool_call>(.*){first}(.*){second}(.*)", text, re.DOTALL)
        told = parts is not None and SCHEMA["function"]["description"] in parts[1]
        if not told or not all(part.strip() for part in parts.groups()):
            raise UserError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path!r} does not render tools, <tool_call> and "
                "tool responses, which QwenTools needs; use another tokenizer or protocol."
            )
        return parts[2], parts[3], parts[4]

    def _render(self, messages: list[dict]) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=[SCHEMA],
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=self.enable_thinking,
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template of tokenizer {self.tokenizer.name_or_path!r} refuses a search agent's messages "
                f"({error}); use another tokenizer or protocol."
            ) from error

    def prompt_text(self, question: str) -> str:
        """The prompt as text; tags and special tokens inside the question are neutralised."""
        return self._render(
            [{"role": "user", "content": self.instruction.replace("{question}", self.neutralise(question))}]
        )

    def prompt_ids(self, question: str) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.encode(self.prompt_text(question))

    def parse_action(self, text: str) -> Action:
        """Reads the call or answer at the first completed stop string; what follows it is ignored.

        INVALID: no closed block, a call that `read_call` cannot read, another function than `search`, other arguments
        than one non-empty `query`, or a tag inside the answer. An empty answer is an ANSWER with `answer=""`.
        """
        ends = [text.find(stop) + len(stop) for stop in self.stop_strings if stop in text]
        text = text[: min(ends, default=len(text))]
        thought, closed, _ = text.partition("</think>")
        think = thought.rpartition("<think>")[2].strip() if closed else None
        said = text.rpartition("</think>")[2]
        if said.endswith("</answer>"):
            _, opened, answer = said[: -len("</answer>")].partition("<answer>")
            if opened and not _TAG.search(answer):
                return Action(ActionKind.ANSWER, answer=answer.strip(), think=think)
        elif said.endswith("</tool_call>"):
            _, opened, body = said[: -len("</tool_call>")].partition("<tool_call>")
            call = read_call(body) if opened else None
            query = call[1].get(PARAMETER) if call and call[0] == FUNCTION and len(call[1]) == 1 else None
            if isinstance(query, str) and query.strip():
                query = query.encode("utf-8", "replace").decode()  # JSON can write half a surrogate pair
                return Action(ActionKind.SEARCH, query=query.strip(), think=think)
        return Action(ActionKind.INVALID, think=think)

    def observe(self, passages: Sequence[Passage], budget: int) -> Observation:
        """Closes the agent's turn, writes `title\\ntext` of each passage into its own tool response, opens the next turn.

        Passages are cut to the budget as `Observation.framed` does. With no passages at all one response says so. A
        passage's span starts with the tags that part it from its predecessor.
        """
        if not passages:
            return self._remark(NOTHING_FOUND, budget)
        pieces = [self.encode(self.neutralise(f"{p.title}\n{p.text}" if p.title else p.text)) for p in passages]
        pieces = [self._between * (i > 0) + ids for i, ids in enumerate(pieces)]
        rows = [passage.row for passage in passages]
        return Observation.framed(self._opening, list(zip(rows, pieces)), self._closing, budget)

    def correction(self, reason: str) -> Observation:
        """A tool response that says what went wrong."""
        if reason not in CORRECTIONS:
            raise ValueError(f"unknown reason {reason!r}; one of {sorted(CORRECTIONS)}")
        return self._remark(CORRECTIONS[reason])

    def final_answer(self, text: str) -> str | None:
        """The last closed answer, stripped; the innermost where answers nest; None if there is none or it is empty."""
        return closed_answer(text) or None

    def format_valid(self, text: str) -> bool:
        """The published rule: thinking closed, every call whole, at least one answer, and the text ends with it.

        No more `<think>` than `</think>` (the first may stand in the prompt); `tool_call` and `answer` blocks balanced and
        not nested; every call names a function and a parameter. Text without tags behind the last `</answer>` is ignored,
        as everywhere.
        """
        text, closed, rest = text.rpartition("</answer>")
        if not closed or _TAG.search(rest) or text.count("<think>") > text.count("</think>"):
            return False
        inside = ""
        for i, piece in enumerate(re.split("(</?(?:tool_call|answer)>)", text + closed)):
            if i % 2 == 0:  # text
                if inside == "<tool_call>" and not (read_call(piece) or ("", {}))[1]:
                    return False
            elif piece.startswith("</"):
                if inside != piece.replace("/", "", 1):
                    return False
                inside = ""
            elif inside:
                return False
            else:
                inside = piece
        return not inside

    def _remark(self, text: str, budget: int | None = None) -> Observation:
        ids = self._opening + self.encode(text) + self._closing
        if budget is not None and len(ids) > budget:
            return Observation.framed(self._opening, [], self._closing, budget)
        return Observation(ids)
