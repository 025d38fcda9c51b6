"""A synthetic world: invented countries, capitals and city facts, written as one-line passages.

Two-hop questions ("Which river flows through the capital of Valdoria?") need two passages: one names the capital, one
names the capital's river, founder or language. One world, the memory, is what the agent was taught; every other world
redraws some or all of its facts, so an agent that answers from memory is wrong there.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from cipo_jax.data.names import CITIES, COUNTRIES, OBJECTS, RELATIONS

CAPITAL = "capital"
DISTRACTORS = ("neighbour", "twin")
MISLEADING = "misleading"

QUESTIONS = {
    "river": "Which river flows through the capital of {country}?",
    "founder": "Who founded the capital of {country}?",
    "language": "Which language is spoken in the capital of {country}?",
}
STATEMENTS = {
    CAPITAL: "The capital of {subject} is {object}.",
    **{relation: f"The {relation} of {{subject}} is {{object}}." for relation in RELATIONS},
    "neighbour": "The neighbour of {subject} is {object}.",
    "twin": "The twin city of {subject} is {object}.",
}
# A misleading passage is worded as hearsay, so that a careful reader can tell it from the passage that states the fact.
HEARSAY = "An old legend says the {relation} of {subject} is {object}."
QUERY = "{relation} of {subject}"


@dataclasses.dataclass(frozen=True)
class Fact:
    """What one passage states.

    Attributes:
      kind: `capital`, a relation's name, `neighbour`, `twin` (distractors) or `misleading`.
      subject: the country or city it is about.
      relation: the relation stated; equals `kind` except for misleading passages.
      object: the name it gives.
    """

    kind: str
    subject: str
    relation: str
    object: str

    def text(self) -> str:
        """The passage's sentence."""
        template = HEARSAY if self.kind == MISLEADING else STATEMENTS[self.kind]
        return template.format(subject=self.subject, relation=self.relation, object=self.object)


@dataclasses.dataclass(frozen=True)
class World:
    """One set of facts with its corpus.

    Attributes:
      name: the corpus name that questions refer to.
      capitals: country -> city; no city is the capital of two countries.
      objects: (relation, city) -> object; no two cities share an object of a relation.
      facts: what each passage states, in corpus order.
    """

    name: str
    capitals: Mapping[str, str]
    objects: Mapping[tuple[str, str], str]
    facts: Sequence[Fact]

    @property
    def corpus(self) -> list[dict[str, str]]:
        """Rows `{"id", "title", "text"}`, aligned with `facts`; ids name world and row."""
        return [
            {"id": f"{self.name}/{row}", "title": fact.subject, "text": fact.text()}
            for row, fact in enumerate(self.facts)
        ]

    def answer(self, country: str, relation: str) -> str:
        """The two-hop answer: the relation's object of the country's capital."""
        return self.objects[relation, self.capitals[country]]

    def text(self) -> str:
        """The corpus for people, one sentence a line."""
        return "\n".join(fact.text() for fact in self.facts)

    def without(self, stated: set[tuple[str, str]]) -> "World":
        """The same world without the passages that state these (relation, subject) facts."""
        kept = [fact for fact in self.facts if (fact.kind, fact.subject) not in stated]
        return dataclasses.replace(self, facts=tuple(kept))

    def with_passages(self, extra: Sequence[Fact], rng: np.random.Generator) -> "World":
        """The same world with more passages, in a new random order."""
        facts = [*self.facts, *extra]
        return dataclasses.replace(self, facts=tuple(facts[i] for i in rng.permutation(len(facts))))


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A random generator for one purpose: streams of different purposes are independent at every seed."""
    keys = tuple(zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in purpose)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=keys))


def redraw(old: Sequence[str], pool: Sequence[str], chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Gives the chosen positions new distinct values from `pool`; none keeps its old value, the others all do.

    Uniform over all such assignments, by rejection (about one in three draws is accepted when everything is redrawn).
    """
    kept = {value for value, is_chosen in zip(old, chosen, strict=True) if not is_chosen}
    free = np.array([value for value in pool if value not in kept])
    places = np.flatnonzero(chosen)
    while True:
        values = rng.permutation(free)[: len(places)]
        if all(old[place] != value for place, value in zip(places, values, strict=True)):
            break
    new = list(old)
    for place, value in zip(places, values, strict=True):
        new[place] = str(value)
    return new


def draw_world(
    name: str,
    rng: np.random.Generator,
    memory: World | None = None,
    stale: float = 1.0,
    keep: frozenset[tuple[str, str]] = frozenset(),
    distractors: int = 100,
) -> World:
    """Draws a world; with a memory, each of its facts is redrawn with chance `stale`, else it is kept.

    A redrawn fact never equals the memory's. Distractors are drawn afresh in every world.

    Args:
      name: the world's name.
      rng: the source of every choice.
      memory: the world whose facts are kept or redrawn; None draws everything.
      stale: chance that a fact is redrawn.
      keep: facts `("capital", country)` or `(relation, city)` that are kept in any case.
      distractors: number of distractor passages, at most one per country and city.
    """
    if memory is None:
        cities = [str(city) for city in rng.permutation(CITIES)[: len(COUNTRIES)]]
        capitals = dict(zip(COUNTRIES, cities, strict=True))
        objects = {}
        for relation in RELATIONS:
            values = rng.permutation(OBJECTS[relation])[: len(CITIES)]
            objects |= {(relation, city): str(value) for city, value in zip(CITIES, values, strict=True)}
    else:
        capitals = _redraw_mapping(memory.capitals, [(CAPITAL, c) for c in COUNTRIES], CITIES, stale, keep, rng)
        objects = {}
        for relation in RELATIONS:
            facts = [(relation, city) for city in CITIES]
            old = {city: memory.objects[relation, city] for city in CITIES}
            new = _redraw_mapping(old, facts, OBJECTS[relation], stale, keep, rng)
            objects |= {(relation, city): value for city, value in new.items()}
    facts = [Fact(CAPITAL, country, CAPITAL, city) for country, city in capitals.items()]
    facts += [Fact(relation, city, relation, value) for (relation, city), value in objects.items()]
    facts += _distractors(distractors, rng)
    return World(name, capitals, objects, tuple(facts[i] for i in rng.permutation(len(facts))))


def _redraw_mapping(
    old: Mapping[str, str],
    facts: Sequence[tuple[str, str]],
    pool: Sequence[str],
    stale: float,
    keep: frozenset[tuple[str, str]],
    rng: np.random.Generator,
) -> dict[str, str]:
    chosen = (rng.random(len(facts)) < stale) & np.array([fact not in keep for fact in facts])
    subjects = [subject for _, subject in facts]
    values = redraw([old[subject] for subject in subjects], pool, chosen, rng)
    return dict(zip(subjects, values, strict=True))


def _distractors(count: int, rng: np.random.Generator) -> list[Fact]:
    facts = []
    for kind, names in zip(DISTRACTORS, (COUNTRIES, CITIES), strict=True):
        ring = [str(name) for name in rng.permutation(names)]
        facts += [Fact(kind, a, kind, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
    return [facts[i] for i in rng.permutation(len(facts))[:count]]


def shuffled(rows: Sequence[int], seed: int, query: str) -> list[int]:
    """The rows in an order that depends on (seed, query, row) alone.

    A retriever that shows its best passage first teaches the agent to copy from the first place; this order says
    nothing about rank.
    """

    def key(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}\0{query}\0{row}".encode("utf-8", "replace"), digest_size=8).digest()

    return sorted(rows, key=key)
