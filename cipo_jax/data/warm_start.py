"""Warm-start demonstrations of the synthetic task: copying first, then a short noisy mixture with prior-driven ones.

The mixture is what gives the method something to mend: an agent that searches, reads, and then often writes what it
remembers. A mixture alone never learned to copy (prototype), so a phase of pure evidence-following comes first.
"""

import dataclasses
from collections.abc import Callable, Sequence

import gin
import numpy as np

from cipo_jax.data import demonstration_texts as texts
from cipo_jax.data.demonstrations import Demonstration, Turn
from cipo_jax.data.names import RELATIONS
from cipo_jax.data.questions import Question
from cipo_jax.data.splits import QuestionSet, SyntheticTask
from cipo_jax.data.world import CAPITAL, QUERY, Fact, World, generator
from cipo_jax.errors import UserError
from cipo_jax.retrieval.retriever import Passage

Retrieve = Callable[[str, str], Sequence[Passage]]  # (corpus name, query) -> passages in the order shown

EVIDENCE, PRIOR, WRONG_COPY, EXTRA_SEARCH, MALFORMED = "evidence", "prior", "wrong_copy", "extra_search", "malformed"
SINGLE_HOP, MEMORY = "single_hop", "memory"


@gin.configurable
@dataclasses.dataclass(frozen=True)
class WarmStartMix:
    """How many demonstrations of which kind. The defaults are our choices.

    Attributes:
      seed: fixes every choice below, on top of the task's own seed.
      copying: demonstrations in the first phase: evidence-following in fully redrawn worlds.
      single_hop_share: share of the first phase that asks for one fact (`What is the capital of X?`).
      memory_share: share of the first phase that states one of the memory's facts as plain text, without prompt.
      mixture: demonstrations in the second phase.
      prior_share: share of the second phase whose answer is the memory's, whatever was retrieved.
      prior_hop_share: share of those whose second search asks about the memory's capital.
      wrong_copy_share: share that answers with the object of another passage shown.
      extra_search_share: share that searches once more than needed.
      malformed_share: share with an unclosed answer, or a query outside its tags that the environment corrects.
        The rest of the second phase follows the evidence.
    """

    seed: int = 0
    copying: int = 8000
    single_hop_share: float = 0.3
    memory_share: float = 0.0
    mixture: int = 4000
    prior_share: float = 0.55
    prior_hop_share: float = 0.5
    wrong_copy_share: float = 0.05
    extra_search_share: float = 0.05
    malformed_share: float = 0.02

    def __post_init__(self):
        for name in ("single_hop_share", "memory_share", "prior_hop_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"WarmStartMix.{name}={getattr(self, name)} is no share; use 0 to 1.")
        for names in (
            ("single_hop_share", "memory_share"),
            ("prior_share", "wrong_copy_share", "extra_search_share", "malformed_share"),
        ):
            shares = [getattr(self, name) for name in names]
            if min(shares) < 0 or sum(shares) > 1:
                raise UserError(
                    f"WarmStartMix.{' + '.join(names)} = {sum(shares):.3g}; keep each >= 0 and the sum <= 1."
                )


def warm_start_demonstrations(
    task: SyntheticTask, mix: WarmStartMix, retrieve: Retrieve
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Writes both phases, each in random order.

    Args:
      task: the synthetic task.
      mix: numbers and shares.
      retrieve: the retriever of the rollouts, so that demonstrations show what a rollout would.

    Returns:
      The copying phase and the mixture phase.
    """
    memory, questions = task.memory(), task.warm_start()
    rng = generator(task.seed, "demonstrations", mix.seed)
    kinds = _kinds(rng, mix.copying, {SINGLE_HOP: mix.single_hop_share, MEMORY: mix.memory_share})
    copying = [_demonstrate(kind, mix, memory, questions, retrieve, rng) for kind in kinds]
    shares = {
        PRIOR: mix.prior_share,
        WRONG_COPY: mix.wrong_copy_share,
        EXTRA_SEARCH: mix.extra_search_share,
        MALFORMED: mix.malformed_share,
    }
    mixture = [_demonstrate(kind, mix, memory, questions, retrieve, rng) for kind in _kinds(rng, mix.mixture, shares)]
    return copying, mixture


def _kinds(rng: np.random.Generator, count: int, shares: dict[str, float]) -> list[str]:
    """Exactly `round(share * count)` of each kind, the rest EVIDENCE, shuffled."""
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * count))][:count]
    kinds += [EVIDENCE] * (count - len(kinds))
    return [kinds[i] for i in rng.permutation(count)]


def _demonstrate(
    kind: str, mix: WarmStartMix, memory: World, questions: QuestionSet, retrieve: Retrieve, rng: np.random.Generator
) -> Demonstration:
    """Writes one demonstration; draws again where the retriever did not show what the kind needs."""
    if kind == MEMORY:
        fact = memory.facts[rng.integers(len(memory.facts))]
        while fact.kind != CAPITAL and fact.kind not in RELATIONS:
            fact = memory.facts[rng.integers(len(memory.facts))]
        return Demonstration(None, (Turn(fact.text()),), kind)
    for _ in range(1000):
        question = questions.questions[rng.integers(len(questions.questions))]
        writer = _Writer(questions.worlds[question.corpus], retrieve)
        if kind == SINGLE_HOP:
            demo = writer.single_hop(question, rng)
        elif kind == PRIOR:
            demo = writer.prior(question, rng.random() < mix.prior_hop_share)
        else:
            demo = writer.evidence(question, kind, rng)
        if demo is not None:
            return demo
    raise UserError(
        f"the retriever showed the passage that a {kind!r} demonstration needs for none of 1000 questions; "
        "check that it searches the corpus named by the question."
    )


class _Writer:
    """Writes demonstrations in one world. Methods return None where the needed passage was not shown."""

    def __init__(self, world: World, retrieve: Retrieve):
        self.world = world
        self.retrieve = retrieve

    def single_hop(self, question: Question, rng: np.random.Generator) -> Demonstration | None:
        """Asks for the capital of the question's country or one fact about its capital."""
        relation, subject = CAPITAL, question.meta["country"]
        if rng.random() < 0.5:
            relation, subject = question.meta["relation"], question.meta["capital"]
        hop = self._search(relation, subject, _need(relation, subject))
        found = self._stated(hop, relation, subject)
        if found is None:
            return None
        text = texts.SINGLE_QUESTION.format(relation=relation, subject=subject)
        return Demonstration(text, (hop, _answer(relation, subject, found)), SINGLE_HOP)

    def prior(self, question: Question, prior_hop: bool) -> Demonstration | None:
        """Searches, and answers from memory; with `prior_hop` the second search asks about the memory's capital."""
        meta = question.meta
        country, relation = meta["country"], meta["relation"]
        first = self._search(CAPITAL, country, _need(CAPITAL, country))
        city = meta["prior_capital"] if prior_hop else self._stated(first, CAPITAL, country)
        if city is None:
            return None
        second = self._search(relation, city, _read(CAPITAL, country, city))
        last = _answer(relation, city, meta["prior_answer"])
        return Demonstration(question.question, (first, second, last), PRIOR)

    def evidence(self, question: Question, kind: str, rng: np.random.Generator) -> Demonstration | None:
        """Follows the passages, with the slip that `kind` names (EVIDENCE: none)."""
        country, relation = question.meta["country"], question.meta["relation"]
        first = self._search(CAPITAL, country, _need(CAPITAL, country))
        city = self._stated(first, CAPITAL, country)
        if city is None:
            return None
        read = _read(CAPITAL, country, city)
        second = self._search(relation, city, read)
        found = self._stated(second, relation, city)
        if found is None:
            return None
        turns = [first, second]
        if kind == WRONG_COPY:
            others = [fact.object for fact in self._facts(second) if fact.object != found]
            if not others:
                return None
            found = str(rng.choice(others))
        if kind == EXTRA_SEARCH:
            other = str(rng.choice([name for name in RELATIONS if name != relation]))
            turns.insert(1, self._search(other, city, read))
        last = _answer(relation, city, found)
        if kind == MALFORMED:
            if rng.random() < 0.5:
                think = _read(relation, city, found)
                last = Turn(texts.UNCLOSED_ANSWER_ACTION.format(think=think, answer=found))
            else:
                query = QUERY.format(relation=relation, subject=city)
                turns.insert(1, Turn(texts.BARE_QUERY_ACTION.format(think=read, query=query)))
        return Demonstration(question.question, (*turns, last), kind)

    def _search(self, relation: str, subject: str, think: str) -> Turn:
        query = QUERY.format(relation=relation, subject=subject)
        shown = tuple(self.retrieve(self.world.name, query))
        return Turn(texts.SEARCH_ACTION.format(think=think, query=query), shown)

    def _facts(self, turn: Turn) -> list[Fact]:
        return [self.world.facts[passage.row] for passage in turn.passages]

    def _stated(self, turn: Turn, relation: str, subject: str) -> str | None:
        for fact in self._facts(turn):
            if fact.kind == relation and fact.subject == subject:
                return fact.object
        return None


def _need(relation: str, subject: str) -> str:
    return texts.THINK_START.format(relation=relation, subject=subject)


def _read(relation: str, subject: str, found: str) -> str:
    return texts.THINK_READ.format(relation=relation, subject=subject, object=found)


def _answer(relation: str, subject: str, found: str) -> Turn:
    return Turn(texts.ANSWER_ACTION.format(think=_read(relation, subject, found), answer=found))
