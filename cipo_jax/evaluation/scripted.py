"""Scripted agents that bound what a policy can reach: one follows the evidence, one answers from memory.

They search with the retriever of the rollouts and talk through its protocol, so a ceiling below 1 shows what the
retriever does not find. The same writing gives the pairs that ask whether EALR tells following from remembering.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cipo_jax.data import demonstration_texts as texts
from cipo_jax.data.demonstrations import Demonstration, Turn, encode_demonstration
from cipo_jax.data.questions import Question
from cipo_jax.data.world import CAPITAL, QUERY, Fact, World
from cipo_jax.protocols.base import ActionKind, Protocol
from cipo_jax.retrieval.retriever import Passage, Retriever
from cipo_jax.rollout.episode import Episode, read_episodes
from cipo_jax.types import Role, StopReason, Trajectories

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
    demos = []
    for question in questions:
        search = _search(retrievers[question.corpus], top_k)
        turns = agent(question, worlds[question.corpus], search)
        demos.append(Demonstration(question.question, tuple(turns)))
    return read_episodes(demonstration_trajectories(demos, protocol, observation_budget), questions, protocol)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two trajectories that differ in their last action alone: same history, same evidence.

    Attributes:
      question: what was asked.
      follow: its last action says what the passages say.
      remember: its last action says what the memory says.
    """

    question: Question
    follow: Demonstration
    remember: Demonstration


def evidence_pairs(
    questions: Sequence[Question], worlds: Mapping[str, World], retrievers: Mapping[str, Retriever], top_k: int
) -> list[Pair]:
    """Pairs on conflict questions: one about the second search, one about the answer, where world and memory differ.

    The history is the oracle's. Questions whose passages are not found give no pair. EALR of the last action should be
    larger for `follow` than for `remember`.
    """
    pairs = []
    for question in questions:
        world, meta = worlds[question.corpus], question.meta
        turns = oracle(question, world, _search(retrievers[question.corpus], top_k))
        if len(turns) < 3 or UNKNOWN in turns[-1].action:
            continue
        country, relation, city = meta["country"], meta["relation"], meta["capital"]
        if meta["prior_capital"] != city:
            query = QUERY.format(relation=relation, subject=meta["prior_capital"])
            think = _read(CAPITAL, country, meta["prior_capital"])
            remembered = Turn(texts.SEARCH_ACTION.format(think=think, query=query))
            pairs.append(_pair(question, turns[:1], Turn(turns[1].action), remembered))
        if meta["gold"] != meta["prior_answer"]:
            remembered = _answer(_read(relation, city, meta["prior_answer"]), meta["prior_answer"])
            pairs.append(_pair(question, turns[:2], turns[2], remembered))
    return pairs


def _pair(question: Question, history: Sequence[Turn], follow: Turn, remember: Turn) -> Pair:
    text = question.question
    return Pair(question, Demonstration(text, (*history, follow)), Demonstration(text, (*history, remember)))


def demonstration_trajectories(
    demos: Sequence[Demonstration], protocol: Protocol, observation_budget: int
) -> Trajectories:
    """Written trajectories as a rollout would have returned them: host arrays, padded to the longest.

    Behaviour log-probs are 0, every demonstration is a group of its own, and one that ends without an answer ended at
    the turn limit.
    """
    records = [encode_demonstration(demo, protocol, observation_budget) for demo in demos]
    shown = [
        [protocol.observe(turn.passages, observation_budget) if turn.passages else None for turn in demo.turns[:-1]]
        for demo in demos
    ]
    rows, length = len(demos), max(map(len, records))
    turns = max(len(demo.turns) for demo in demos)
    passages = max([1, *(len(o.rows) for demo in shown for o in demo if o)])
    out = Trajectories(
        tokens=np.zeros((rows, length), np.int32),
        role=np.full((rows, length), Role.PAD, np.int8),
        turn=np.full((rows, length), -1, np.int8),
        behaviour_logprob=np.zeros((rows, length), np.float32),
        length=np.array([len(record) for record in records], np.int32),
        group=np.arange(rows, dtype=np.int32),
        stop_reason=np.zeros(rows, np.int32),
        action_span=np.zeros((rows, turns, 2), np.int32),
        evidence_span=np.zeros((rows, turns, 2), np.int32),
        content_span=np.zeros((rows, turns, 2), np.int32),
        passage_span=np.zeros((rows, turns, passages, 2), np.int32),
        passage_row=np.full((rows, turns, passages), -1, np.int32),
    )
    for b, (demo, record) in enumerate(zip(demos, records)):
        out.tokens[b, : len(record)] = record.ids
        out.role[b, : len(record)] = record.roles
        out.turn[b, : len(record)] = record.turns
        answered = protocol.parse_action(demo.turns[-1].action).kind is ActionKind.ANSWER
        out.stop_reason[b] = StopReason.ANSWER if answered else StopReason.TURN_LIMIT
        for t in range(len(demo.turns)):
            out.action_span[b, t] = _span(out, b, t, Role.ACTION)
        for t, observation in enumerate(shown[b]):
            if observation is not None and observation.rows:
                start, _ = out.evidence_span[b, t] = _span(out, b, t, Role.OBSERVATION)
                out.content_span[b, t] = np.add(observation.content, start)
                count = len(observation.rows)
                out.passage_span[b, t, :count] = np.add(observation.passages, start)
                out.passage_row[b, t, :count] = observation.rows
    return out


def _span(trajectories: Trajectories, b: int, turn: int, role: int) -> tuple[int, int]:
    places = np.flatnonzero((trajectories.role[b] == role) & (trajectories.turn[b] == turn))
    return int(places[0]), int(places[-1]) + 1


def _search(retriever: Retriever, top_k: int) -> Search:
    return lambda query: retriever.retrieve([query], top_k)[0]


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
