"""Worlds: every passage states its fact, redrawn facts differ, shares and orders are as promised."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.data.names import CITIES, COUNTRIES, OBJECTS, RELATIONS
from cipo_jax.data.world import CAPITAL, DISTRACTORS, draw_world, generator, redraw, shuffled

MEMORY = draw_world("memory", generator(0, "memory"))


def _check(world):
    """What holds for every world."""
    assert set(world.capitals) == set(COUNTRIES) and len(set(world.capitals.values())) == len(COUNTRIES)
    assert set(world.capitals.values()) <= set(CITIES)
    for relation in RELATIONS:
        values = [world.objects[relation, city] for city in CITIES]
        assert len(set(values)) == len(CITIES) and set(values) <= set(OBJECTS[relation])
    stated = {(fact.kind, fact.subject): fact.object for fact in world.facts}
    assert len(stated) == len(world.facts)
    for country, city in world.capitals.items():
        assert stated[CAPITAL, country] == city
    for key, value in world.objects.items():
        assert stated[key] == value


def test_memory_world():
    _check(MEMORY)
    assert len(MEMORY.facts) == 320
    assert MEMORY.answer("Valdoria", "river") == MEMORY.objects["river", MEMORY.capitals["Valdoria"]]


def test_corpus_is_aligned_with_facts():
    corpus = MEMORY.corpus
    assert len({row["id"] for row in corpus}) == len(corpus) == len(MEMORY.facts)
    for row, fact in zip(corpus, MEMORY.facts, strict=True):
        assert row["title"] == fact.subject
        assert row["text"].endswith(f" of {fact.subject} is {fact.object}.") and fact.relation in row["text"]
    kinds = [fact.kind for fact in MEMORY.facts]
    assert kinds != sorted(kinds) and kinds.count(CAPITAL) == 40 and sum(kinds.count(k) for k in DISTRACTORS) == 100


@given(st.integers(0, 10_000), st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_redrawn_worlds_are_worlds(seed, stale):
    _check(draw_world("w", np.random.default_rng(seed), MEMORY, stale))


def test_a_fully_redrawn_world_shares_no_fact():
    world = draw_world("w", generator(3, "w"), MEMORY)
    assert all(world.capitals[c] != MEMORY.capitals[c] for c in COUNTRIES)
    assert all(world.objects[key] != MEMORY.objects[key] for key in world.objects)


def test_an_unstale_world_shares_all_facts():
    world = draw_world("w", generator(3, "w"), MEMORY, stale=0.0)
    assert world.capitals == MEMORY.capitals and world.objects == MEMORY.objects


def test_kept_facts_are_kept():
    keep = frozenset({(CAPITAL, "Valdoria"), ("river", "Brenavik")})
    world = draw_world("w", generator(3, "w"), MEMORY, keep=keep)
    assert world.capitals["Valdoria"] == MEMORY.capitals["Valdoria"]
    assert world.objects["river", "Brenavik"] == MEMORY.objects["river", "Brenavik"]
    assert world.objects["founder", "Brenavik"] != MEMORY.objects["founder", "Brenavik"]


def test_stale_share():
    stale = []
    for i in range(20):
        world = draw_world("w", generator(1, "stale", i), MEMORY, stale=0.3)
        stale += [world.capitals[c] != MEMORY.capitals[c] for c in COUNTRIES]
        stale += [world.objects[key] != MEMORY.objects[key] for key in world.objects]
    # 4,400 draws: the standard deviation of the share is .007.
    assert np.mean(stale) == pytest.approx(0.3, abs=0.03)


def test_redraw_reaches_every_allowed_assignment_equally():
    rng = np.random.default_rng(0)
    counts = {}
    for _ in range(6000):
        new = tuple(redraw(["a", "b", "c"], ["a", "b", "c", "d"], np.array([True, False, True]), rng))
        counts[new] = counts.get(new, 0) + 1
    # The first may become c or d, the last a or d, never both d.
    assert set(counts) == {("c", "b", "a"), ("c", "b", "d"), ("d", "b", "a")}
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_streams_are_apart_and_repeat():
    a, b = generator(0, "world", "rl", 1), generator(0, "world", "val", 1)
    assert a.random() == generator(0, "world", "rl", 1).random()
    assert len({generator(0, "x", 1).random(), generator(0, "x", 2).random(), generator(1, "x", 1).random()}) == 3
    assert a.random() != b.random()


def test_shuffled_depends_on_the_query_alone_and_is_fair():
    assert shuffled([5, 9], 0, "river of Brenavik") == shuffled([9, 5], 0, "river of Brenavik")
    first = [shuffled([5, 9], 0, f"query {i}")[0] == 5 for i in range(1000)]
    assert np.mean(first) == pytest.approx(0.5, abs=0.06)
    assert any(shuffled([5, 9], 0, f"query {i}") != shuffled([5, 9], 1, f"query {i}") for i in range(20))
    assert sorted(shuffled([1, 2, 3], 0, "\ud800\0")) == [1, 2, 3]
