"""Demonstrations for the warm start: their JSON-lines form and their tokens, built through the protocol."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cipo_jax.errors import UserError
from cipo_jax.protocols.base import INVALID_ACTION, ActionKind, Protocol
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.types import Role


@dataclasses.dataclass(frozen=True)
class Turn:
    """One action and the passages that answered it.

    Attributes:
      action: the text the agent wrote, stop string included.
      passages: what its search returned, in the order shown; empty for an answer or an invalid action.
    """

    action: str
    passages: tuple[Passage, ...] = ()


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """A written trajectory.

    Attributes:
      question: the question shown in the prompt; None for plain text to learn (no prompt, one turn).
      turns: at least one; the last one is never answered by an observation.
      kind: what it demonstrates, for statistics.
    """

    question: str | None
    turns: tuple[Turn, ...]
    kind: str = "demonstration"


@dataclasses.dataclass(frozen=True)
class TokenRecord:
    """Tokens of a demonstration, laid out as in `Trajectories`; three lists of equal length.

    Attributes:
      ids: token ids.
      roles: a `Role` per token; the warm start learns the ACTION tokens.
      turns: the turn id per token, -1 in the prompt.
    """

    ids: list[int]
    roles: list[int]
    turns: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def encode_demonstration(demo: Demonstration, protocol: Protocol, observation_budget: int) -> TokenRecord:
    """Encodes a demonstration exactly as a rollout would have laid it out.

    Prompt, actions and observations come from the protocol, each encoded apart and joined as ids. An action that
    completes no stop string is ended by an end-of-turn token. An action that doesn't parse is answered by the
    protocol's correction. A search without passages is answered by the protocol's words for that. Nothing follows the
    last action.

    Args:
      demo: the demonstration.
      protocol: how the agent talks.
      observation_budget: tokens an observation may have, as in the rollout.
    """
    ids: list[int] = []
    roles: list[int] = []
    turns: list[int] = []

    def add(part: Sequence[int], role: int, turn: int) -> None:
        ids.extend(part)
        roles.extend([role] * len(part))
        turns.extend([turn] * len(part))

    if demo.question is None:
        for turn in demo.turns:
            add(protocol.encode(turn.action), Role.ACTION, 0)
        return TokenRecord(ids, roles, turns)
    add(protocol.prompt_ids(demo.question), Role.PROMPT, -1)
    for t, turn in enumerate(demo.turns):
        add(protocol.encode_action(turn.action), Role.ACTION, t)
        if t + 1 == len(demo.turns):
            break
        if protocol.parse_action(turn.action).kind == ActionKind.SEARCH:
            observation = protocol.observe(turn.passages, observation_budget)
        else:
            observation = protocol.correction(INVALID_ACTION)
        add(observation.ids, Role.OBSERVATION, t)
    return TokenRecord(ids, roles, turns)


def save_demonstrations(path: str | Path, demos: Iterable[Demonstration]) -> None:
    """Writes JSON lines `{"question", "kind", "turns": [{"action", "passages": [{"id", "title", "text", "row"}]}]}`."""
    with open(path, "w", encoding="utf-8") as file:
        for demo in demos:
            turns = [
                {"action": turn.action, "passages": [_passage_row(p) for p in turn.passages]} for turn in demo.turns
            ]
            row = {"question": demo.question, "kind": demo.kind, "turns": turns}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def load_demonstrations(path: str | Path) -> list[Demonstration]:
    """Reads what `save_demonstrations` writes; `kind`, `passages` and a passage's `id`, `title`, `row` are optional.

    Raises:
      UserError: naming file and line, for anything else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); give a JSON-lines file.") from error
    demos = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not JSON ({error}); write one JSON object per line.") from error
            demos.append(_demonstration(row, f"{path}:{number}"))
    if not demos:
        raise UserError(f"{path}: holds no demonstration; write one JSON object per line.")
    return demos


def _passage_row(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "title": passage.title, "text": passage.text, "row": passage.row}


def _demonstration(row: Any, where: str) -> Demonstration:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: {str(row)[:60]!r} is no JSON object; write one with question and turns.")
    question = row.get("question", "")
    if question is not None and (not isinstance(question, str) or not question.strip()):
        raise UserError(
            f"{where}: question={question!r} is not a non-empty text; give the question (null: plain text)."
        )
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: turns={turns!r} is not a non-empty list; give at least one action.")
    parsed = tuple(_turn(turn, f"{where}: turn {t}") for t, turn in enumerate(turns))
    return Demonstration(question, parsed, str(row.get("kind", "demonstration")))


def _turn(turn: Any, where: str) -> Turn:
    action = turn.get("action") if isinstance(turn, Mapping) else None
    if not isinstance(action, str) or not action:
        raise UserError(f"{where}: action={action!r} is not a non-empty text; write the agent's action.")
    passages = turn.get("passages") or []
    if not isinstance(passages, list):
        raise UserError(f"{where}: passages={passages!r} is not a list; write a list of passages.")
    shown = []
    for i, passage in enumerate(passages):
        if not isinstance(passage, Mapping) or not isinstance(passage.get("text"), str):
            raise UserError(f'{where}: passage {i} lacks "text"; write {{"title": .., "text": ..}}.')
        row = passage.get("row", -1)
        if not isinstance(row, int) or isinstance(row, bool):
            raise UserError(f"{where}: passage {i} has row={row!r}; write an integer or leave it out.")
        shown.append(Passage(row, str(passage.get("id", i)), str(passage.get("title", "")), passage["text"]))
    return Turn(action, tuple(shown))
