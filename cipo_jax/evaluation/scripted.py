"""Scripted agents that bound what a policy can reach: one follows the evidence, one answers from memory.

They search with the retriever of the rollouts and talk through its protocol, so a ceiling below 1 shows what the
retriever does not find.
"""

from collections.abc import Callable, Mapping, Sequence

from cipo_jax.data import demonstration_texts as texts
from cipo_jax.data.demonstrations import Demonstration, Turn, encode_demonstration
from cipo_jax.data.questions import Question
from cipo_jax.data.world import CAPITAL, QUERY, Fact, World
from cipo_jax.protocols.base import ActionKind, Protocol
from cipo_jax.retrieval.retriever import Passage, Retriever
from cipo_jax.rollout import episode as episodes
from cipo_jax.rollout.episode import Episode
from cipo_jax.types import Role, StopReason

UNKNOWN = "unknown"  # what the oracle answers when the passages do not say

Search = Callable[[str], Sequence[Passage]]
Agent = Callable[[Question, World, Search], list[Turn]]


def oracle(question: Question, world: World, search: Search) -> list[Turn]:
    """Follows the evidence: asks for the capital, reads it, asks for that city's relation, answers what it reads."""
    country, relation = question.meta["country"], question.meta["relation"]
    first, city = _look_up(world, search, CAPITAL, country, _need(CAPITAL, country))
    if city is None:
        return [first, _answer(_need(CAPITAL, country), UNKNOWN)]
    second, found = _look_up(world, search, relation, city, _read(CAPITAL, country, city))
    if found is None:
        return [first, second, _answer(_need(relation, city), UNKNOWN)]
    return [first, second, _answer(_read(relation, city, found), found)]


def memory(question: Question, world: World, search: Search) -> list[Turn]:
    """Makes both searches, the second about the memory's capital, and answers what the memory holds."""
    meta = question.meta
    country, relation, city = meta["country"], meta["relation"], meta["prior_capital"]
    first, _ = _look_up(world, search, CAPITAL, country, _need(CAPITAL, country))
    second, _ = _look_up(world, search, relation, city, _read(CAPITAL, country, city))
    return [first, second, _answer(_read(relation, city, meta["prior_answer"]), meta["prior_answer"])]


def run_scripted(
    agent: Agent,
    questions: Sequence[Question],
    worlds: Mapping[str, World],
    retrievers: Mapping[str, Retriever],
    protocol: Protocol,
    top_k: int,
    observation_budget: int = 1 << 20,
) -> list[Episode]:
    """Lets a scripted agent answer questions.

    Args:
      agent: `oracle` or `memory`.
      questions: of the synthetic world.
      worlds: by corpus name.
      retrievers: by corpus name.
      protocol: how the agent talks; one that reads Search-R1's tags.
      top_k: passages per search.
      observation_budget: tokens an observation may have.

    Returns:
      One episode per question, for `behaviour.summarise`. The agent reads all passages; the episode holds those that
      fit into the budget.
    """
    out = []
    for question in questions:
        retriever = retrievers[question.corpus]

        def search(query: str, retriever=retriever) -> list[Passage]:
            return retriever.retrieve([query], top_k)[0]

        turns = agent(question, worlds[question.corpus], search)
        demo = Demonstration(question.question, tuple(turns))
        out.append(episode_from_demonstration(demo, question, protocol, observation_budget))
    return out


def episode_from_demonstration(
    demo: Demonstration, question: Question, protocol: Protocol, observation_budget: int
) -> Episode:
    """Reads a written trajectory as the episode that the same tokens from a rollout would have given."""
    record = encode_demonstration(demo, protocol, observation_budget)
    turns = []
    for t, written in enumerate(demo.turns):
        ids = [i for i, role, turn in zip(record.ids, record.roles, record.turns) if role == Role.ACTION and turn == t]
        text = protocol.tokenizer.decode(ids)
        answered = written.passages and t + 1 < len(demo.turns)
        rows = protocol.observe(written.passages, observation_budget).rows if answered else []
        turns.append(episodes.Turn(text, protocol.parse_action(text), tuple(rows)))
    response = protocol.tokenizer.decode([i for i, role in zip(record.ids, record.roles) if role != Role.PROMPT])
    answer = protocol.final_answer(response)
    malformed = not (answer or "").strip() or any(t.action.kind is ActionKind.INVALID for t in turns)
    ended = StopReason.ANSWER if turns[-1].action.kind is ActionKind.ANSWER else StopReason.TURN_LIMIT
    return Episode(question, tuple(turns), response, answer, malformed, StopReason.NAMES[ended], len(record))


def _look_up(world: World, search: Search, relation: str, subject: str, think: str) -> tuple[Turn, str | None]:
    query = QUERY.format(relation=relation, subject=subject)
    passages = tuple(search(query))
    action = texts.SEARCH_ACTION.format(think=think, query=query)
    return Turn(action, passages), _stated([world.facts[p.row] for p in passages], relation, subject)


def _stated(facts: Sequence[Fact], relation: str, subject: str) -> str | None:
    return next((fact.object for fact in facts if fact.kind == relation and fact.subject == subject), None)


def _need(relation: str, subject: str) -> str:
    return texts.THINK_START.format(relation=relation, subject=subject)


def _read(relation: str, subject: str, found: str) -> str:
    return texts.THINK_READ.format(relation=relation, subject=subject, object=found)


def _answer(think: str, answer: str) -> Turn:
    return Turn(texts.ANSWER_ACTION.format(think=think, answer=answer))
