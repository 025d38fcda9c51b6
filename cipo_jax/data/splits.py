"""The synthetic task's question sets: warm-start worlds, RL, validation and the four reported strata."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import gin
import numpy as np

from cipo_jax.data.names import COUNTRIES, OBJECTS, RELATIONS
from cipo_jax.data.questions import Question
from cipo_jax.data.world import CAPITAL, MISLEADING, QUESTIONS, Fact, World, draw_world, generator
from cipo_jax.errors import UserError

CONFLICT, AGREE, REMOVED, MISLED = "conflict", "agree", "removed", "misleading"
STRATA = (CONFLICT, AGREE, REMOVED, MISLED)


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Questions and the worlds they search, by corpus name."""

    questions: tuple[Question, ...]
    worlds: Mapping[str, World]

    @property
    def conflict_share(self) -> float:
        """Share of questions whose gold answer differs from the memory's."""
        return float(np.mean([q.meta["conflict"] for q in self.questions])) if self.questions else 0.0


@gin.configurable
@dataclasses.dataclass(frozen=True)
class SyntheticTask:
    """Sizes and chances of the synthetic task. The defaults are our choices.

    Attributes:
      seed: fixes the memory world, the held-out countries and every other world.
      stale: chance that a fact of an RL world is redrawn.
      heldout_countries: countries never asked about in RL; validation and the reported sets ask about them alone.
      distractors: distractor passages a world, up to 100.
      warm_start_worlds: redrawn worlds for demonstrations.
      rl_worlds: worlds of the RL questions.
      validation_questions, conflict_questions, stratum_questions: sizes of the validation set, of the reported conflict
        set and of each other reported stratum.
    """

    seed: int = 0
    stale: float = 0.3
    heldout_countries: int = 10
    distractors: int = 100
    warm_start_worlds: int = 80
    rl_worlds: int = 8
    validation_questions: int = 300
    conflict_questions: int = 600
    stratum_questions: int = 150

    def __post_init__(self):
        if not 0.0 <= self.stale <= 1.0:
            raise UserError(f"SyntheticTask.stale={self.stale} is no probability; use 0 to 1.")
        if not 1 <= self.heldout_countries < len(COUNTRIES):
            raise UserError(
                f"SyntheticTask.heldout_countries={self.heldout_countries} leaves no country on one side; "
                f"use 1 to {len(COUNTRIES) - 1}."
            )

    @property
    def heldout(self) -> tuple[str, ...]:
        """The held-out countries, in the pool's order."""
        chosen = generator(self.seed, "heldout").permutation(len(COUNTRIES))[: self.heldout_countries]
        return tuple(COUNTRIES[i] for i in sorted(chosen))

    @property
    def training(self) -> tuple[str, ...]:
        """The countries RL asks about, in the pool's order."""
        return tuple(country for country in COUNTRIES if country not in set(self.heldout))

    def memory(self) -> World:
        """The memory world: what the warm start teaches and what the agent falls back on."""
        return draw_world("memory", generator(self.seed, "memory"), distractors=self.distractors)

    def warm_start(self) -> QuestionSet:
        """Fully redrawn worlds with the questions about all countries, for demonstrations."""
        memory = self.memory()
        worlds = [self._world("warm", i, memory) for i in range(self.warm_start_worlds)]
        return _question_set(_ask(worlds, memory, COUNTRIES, "warm_start"), worlds)

    def rl(self) -> QuestionSet:
        """Every question about training countries in worlds whose facts are stale with chance `stale`."""
        memory = self.memory()
        worlds = [self._world("rl", i, memory, self.stale) for i in range(self.rl_worlds)]
        return _question_set(_ask(worlds, memory, self.training, "train"), worlds)

    def validation(self) -> QuestionSet:
        """Conflict questions about held-out countries in fully redrawn worlds."""
        return self._stratum(CONFLICT, "val", self.validation_questions, "validation")

    def reported(self) -> dict[str, QuestionSet]:
        """The reported sets by stratum, all about held-out countries, each in worlds of its own.

        - conflict: every fact is redrawn and gold differs from the memory's answer.
        - agree: both asked facts are the memory's, so gold is its answer; every other fact is redrawn.
        - removed: as conflict, without the passages that state the asked capital and the capital's asked relation.
          The corpus no longer holds the answer; gold is still the world's.
        - misleading: as conflict, with one more passage per question. It gives the asked relation of the asked capital
          as hearsay (`An old legend says ..`) with another object of the right type, neither gold nor the memory's
          answer; `meta["misleading"]` names it.
        """
        sizes = {s: self.conflict_questions if s == CONFLICT else self.stratum_questions for s in STRATA}
        return {stratum: self._stratum(stratum, f"test-{stratum}", size, "test") for stratum, size in sizes.items()}

    def _world(self, prefix: str, i: int, memory: World, stale: float = 1.0, keep=frozenset()) -> World:
        rng = generator(self.seed, "world", prefix, i)
        return draw_world(f"{prefix}-{i}", rng, memory, stale, keep, self.distractors)

    def _stratum(self, stratum: str, prefix: str, size: int, split: str) -> QuestionSet:
        memory, countries = self.memory(), self.heldout
        keep = frozenset()
        if stratum == AGREE:
            capitals = [memory.capitals[country] for country in countries]
            keep = frozenset((CAPITAL, c) for c in countries) | {(r, city) for r in RELATIONS for city in capitals}
        worlds: list[World] = []
        questions: list[Question] = []
        while len(questions) < size:
            world = self._world(prefix, len(worlds), memory, keep=keep)
            asked = _ask([world], memory, countries, split, stratum)
            asked = [q for q in asked if q.meta["conflict"] == (stratum != AGREE)]
            if stratum == REMOVED:
                world = world.without({fact for q in asked for fact in gold_facts(q)})
            if stratum == MISLED:
                rng = generator(self.seed, "misleading", prefix, len(worlds))
                asked, extra = _mislead(asked, rng)
                world = world.with_passages(extra, rng)
            worlds.append(world)
            questions += asked[: size - len(questions)]
        return _question_set(questions, worlds)


def gold_facts(question: Question) -> tuple[tuple[str, str], tuple[str, str]]:
    """The two facts, as (relation, subject), that a two-hop question needs in its world."""
    meta = question.meta
    return (CAPITAL, meta["country"]), (meta["relation"], meta["capital"])


def _question_set(questions: Iterable[Question], worlds: Sequence[World]) -> QuestionSet:
    return QuestionSet(tuple(questions), {world.name: world for world in worlds})


def _ask(
    worlds: Sequence[World], memory: World, countries: Sequence[str], split: str, stratum: str | None = None
) -> list[Question]:
    """Every two-hop question about the countries in each world, in a fixed order."""
    questions = []
    for world in worlds:
        for country in countries:
            for relation in RELATIONS:
                capital, gold = world.capitals[country], world.answer(country, relation)
                prior = memory.answer(country, relation)
                conflict = gold != prior
                meta = {
                    "country": country,
                    "relation": relation,
                    "capital": capital,
                    "prior_capital": memory.capitals[country],
                    "prior_answer": prior,
                    "prior_of_capital": memory.objects[relation, capital],
                    "gold": gold,
                    "conflict": conflict,
                    "stratum": stratum or (CONFLICT if conflict else AGREE),
                    "split": split,
                }
                text = QUESTIONS[relation].format(country=country)
                questions.append(Question(f"{world.name}/{country}/{relation}", text, (gold,), world.name, meta))
    return questions


def _mislead(questions: Sequence[Question], rng: np.random.Generator) -> tuple[list[Question], list[Fact]]:
    """Adds to each question the wrong object that one extra passage will name."""
    changed, extra = [], []
    for q in questions:
        meta = dict(q.meta)
        wrong = [name for name in OBJECTS[meta["relation"]] if name not in (meta["gold"], meta["prior_answer"])]
        meta["misleading"] = str(rng.choice(wrong))
        extra.append(Fact(MISLEADING, meta["capital"], meta["relation"], meta["misleading"]))
        changed.append(dataclasses.replace(q, meta=meta))
    return changed, extra
