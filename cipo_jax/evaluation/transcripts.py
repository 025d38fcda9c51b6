"""Transcripts of search agents, whoever made them, read as prompt, actions and observations.

Three forms, told apart by their fields, in a JSON array or in JSON lines:

* Search-R1 text: `{"question", "golden_answers", "output": {"query", "final_response"}}`, or `"prompt"` and `"response"` at
  the top level; observations stand in `<information>` behind a search.
* chat messages: `{"messages": [{"role", "content", "tool_calls"?}, ..]}`; tool results are messages of the role `tool`, or
  user messages that hold `<tool_response>` or `<information>`.
* this project's own: token ids with their spans (see `transcript_tokens.py`), never re-encoded.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cipo_jax.errors import UserError
from cipo_jax.types import Role

# Fields of a record in this project's own form, beside id, question and golds: see `types.Trajectories`.
OWN_PER_TOKEN = ("tokens", "role", "turn")
OWN_PER_TURN = ("action_span", "evidence_span", "content_span", "passage_span", "passage_row")


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a transcript with one writer.

    Attributes:
      role: `Role.PROMPT`, `ACTION` or `OBSERVATION`.
      pieces: its text in pieces that are encoded apart, so that spans fall on token borders.
      passages: which of `pieces` are passages, in order and behind each other; none in an observation without evidence.
    """

    role: int
    pieces: tuple[str, ...]
    passages: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One trajectory.

    Attributes:
      id: names it in reports.
      question: what was asked; empty if the record does not say.
      golds: gold answers; empty if the record does not say.
      parts: the prompt, then actions and observations in turn.
      remarks: reasons why something that looks like evidence is not counted as such, one entry per case.
      encoded: token ids and spans of a record in this project's own form, else None.
    """

    id: str
    question: str
    golds: tuple[str, ...]
    parts: tuple[Part, ...]
    remarks: tuple[str, ...] = ()
    encoded: Mapping[str, Any] | None = None


def read_transcripts(path: str | Path) -> tuple[list[Transcript], list[str]]:
    """The transcripts of a file, and one reason for every record that could not be read.

    Raises:
      UserError: the file does not exist or is neither a JSON array nor JSON lines.
    """
    transcripts, unreadable = [], []
    for number, record in enumerate(_records(Path(path)), 1):
        try:
            transcripts.append(read_transcript(record, str(number)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            unreadable.append(f"record {number}: {type(error).__name__} {error}")
    return transcripts, unreadable


def _records(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; name a file of transcripts.") from error
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not JSON ({error}); give a JSON array or JSON lines.") from error
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error}); give one object a line.") from error


def read_transcript(record: Mapping[str, Any], name: str = "") -> Transcript:
    """One record, in whichever of the three forms.

    Raises:
      KeyError, TypeError, ValueError: it is in none of them; the message says what is missing.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"it is a {type(record).__name__}, not an object")
    golds = next((record[k] for k in ("golden_answers", "golds", "answers", "answer") if record.get(k)), ())
    golds = (golds,) if isinstance(golds, str) else tuple(str(g) for g in golds)
    known = str(record.get("id", name)), str(record.get("question") or ""), golds
    if "tokens" in record and "role" in record:
        for name in OWN_PER_TOKEN:
            if len(record[name]) != len(record["tokens"]):
                raise ValueError(f"{name} has {len(record[name])} entries for {len(record['tokens'])} tokens")
        for name in OWN_PER_TURN:
            if len(record[name]) != len(record["action_span"]):
                raise ValueError(f"{name} has {len(record[name])} entries for {len(record['action_span'])} turns")
        return Transcript(*known, (), encoded=record)
    if "messages" in record:
        return Transcript(*known, *_chat(record["messages"]))
    output = record.get("output") if isinstance(record.get("output"), Mapping) else record
    response = next((output[k] for k in ("final_response", "response") if k in output), None)
    if not isinstance(response, str):
        raise ValueError("it has no messages, no tokens, and no text as final_response or response")
    prompt = next((str(output[k]) for k in ("query", "prompt") if output.get(k)), known[1])
    parts, remarks = _search_r1(response)
    return Transcript(*known, (Part(Role.PROMPT, (prompt,)), *parts), remarks)


# What the environment of Search-R1 writes: passages behind a search, or a remark on an invalid action.
_INFORMATION = re.compile(r"<information>(.*?)</information>\s*", re.DOTALL)
_REMARK = re.compile(r"\n*My previous action is invalid\..*?Let me try again\.\n*", re.DOTALL)
_PASSAGE = re.compile(r"(?m)^Doc \d+\s?\(Title: ")
NOT_A_SEARCH = "information_without_search"  # written by the model, or by an unknown environment
UNCLOSED = "information_never_closed"
EMPTY = "information_empty"
FORGED = "information_written_by_the_model"


def _search_r1(response: str) -> tuple[list[Part], tuple[str, ...]]:
    parts, remarks, at = [], [], 0
    blocks = sorted([*_INFORMATION.finditer(response), *_REMARK.finditer(response)], key=lambda m: m.start())
    for block in blocks:
        if block.start() < at:
            continue
        before = response[at : block.start()]
        if block.re is _INFORMATION:
            reason = _not_evidence(before, block[1])
            if reason:
                remarks.append(reason)
                if reason != EMPTY:
                    continue  # it stays a part of the action
            start = at + len(before.rstrip("\n"))
            opening = response[start : block.start(1)]
            closing = response[block.end(1) : block.end()]
            observation = _observation(opening, block[1], closing)
        else:
            start, observation = block.start(), Part(Role.OBSERVATION, (block[0],))
        if start > at:
            parts.append(Part(Role.ACTION, (response[at:start],)))
        parts.append(observation)
        at = block.end()
    if at < len(response):
        parts.append(Part(Role.ACTION, (response[at:],)))
    unclosed = response.rfind("<information>")
    if unclosed >= 0 and "</information>" not in response[unclosed:]:
        remarks.append(UNCLOSED)
    return parts, tuple(remarks)


def _not_evidence(before: str, content: str) -> str | None:
    """Why an information block is not what a search brought, or None."""
    if not re.search(r"</search>\s*$", before):
        return NOT_A_SEARCH
    if not content.strip():
        return EMPTY
    if not before.endswith("\n\n") and not _PASSAGE.match(content):
        return FORGED  # the environment parts its block by an empty line and numbers its passages
    return None


def _observation(opening: str, content: str, closing: str) -> Part:
    """An observation whose passages are cut where a numbered title begins; one passage if none does."""
    cuts = [m.start() for m in _PASSAGE.finditer(content)]
    # A passage takes the line break before it, so that the passages are the content, whole.
    edges = [0, *(c - 1 for c in cuts if c > 0), len(content)]
    passages = [content[a:b] for a, b in itertools.pairwise(edges) if content[a:b]]
    numbers = tuple(range(1, len(passages) + 1)) if content.strip() else ()
    return Part(Role.OBSERVATION, (opening, *passages, closing), numbers)


_TOOL_RESPONSE = re.compile(r"(<tool_response>\n?)(.*?)(\n?</tool_response>)", re.DOTALL)


def _chat(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """Chat messages in ChatML. What an assistant wrote, its end-of-turn mark included, is an action; headers are not."""
    parts: list[Part] = []
    remarks: list[str] = []
    pending = ""  # headers and prompts that wait for the next part
    answered = False
    for message in messages:
        role, content = message["role"], _text(message.get("content"))
        if role == "assistant":
            written = content + "".join(_call(call) for call in message.get("tool_calls") or ())
            opening = pending + "<|im_start|>assistant\n"
            if parts and parts[-1].role == Role.OBSERVATION:
                last = parts.pop()
                parts.append(Part(Role.OBSERVATION, (*last.pieces, opening), last.passages))
            else:
                parts.append(Part(Role.OBSERVATION if answered else Role.PROMPT, (opening,)))
            parts.append(Part(Role.ACTION, (written + "<|im_end|>",)))
            pending, answered = "\n", True
        elif answered and (
            role in ("tool", "function") or _TOOL_RESPONSE.search(content) or "<information>" in content
        ):
            header = pending + "<|im_start|>user\n"
            observation = _tool_result(content, wrap=role in ("tool", "function"))
            if not observation.passages:
                remarks.append(EMPTY)
            before = [header]
            if parts[-1].role == Role.OBSERVATION:  # results that follow each other share a turn
                last = parts.pop()
                before = [*last.pieces[:-1], "\n"]
                shown = last.passages
            else:
                shown = ()
            pieces = (*before, *observation.pieces, "<|im_end|>")
            shown += tuple(n + len(before) for n in observation.passages)
            parts.append(Part(Role.OBSERVATION, pieces, shown))
            pending = "\n"
        else:
            pending += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    return tuple(parts), tuple(remarks)


def _tool_result(content: str, wrap: bool) -> Part:
    found = _TOOL_RESPONSE.search(content) or _INFORMATION.search(content)
    if found and found.re is _TOOL_RESPONSE:
        return _observation(content[: found.end(1)], found[2], content[found.end(2) :])
    if found:
        return _observation(content[: found.start(1)], found[1], content[found.end(1) :])
    return _observation(*(("<tool_response>\n", content, "\n</tool_response>") if wrap else ("", content, "")))


def _text(content: Any) -> str:
    """A message's text; content in blocks is joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block if isinstance(block, str) else str(block.get("text", "")) for block in content)


def _call(call: Mapping[str, Any]) -> str:
    """A tool call in Qwen's text form."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'\n<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
