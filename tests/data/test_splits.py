"""The synthetic task's question sets: who is asked about what, and which passages are there."""

import dataclasses

import pytest

from cipo_jax.data.names import COUNTRIES, RELATIONS
from cipo_jax.data.splits import AGREE, CONFLICT, MISLED, REMOVED, STRATA, SyntheticTask, gold_facts
from cipo_jax.data.world import CAPITAL, MISLEADING
from cipo_jax.errors import UserError

TASK = SyntheticTask(seed=5, warm_start_worlds=3)
MEMORY = TASK.memory()
RL, VALIDATION, REPORTED = TASK.rl(), TASK.validation(), TASK.reported()
ALL = {"rl": RL, "validation": VALIDATION, "warm": TASK.warm_start(), **REPORTED}


def _stated(question_set, q):
    return {(f.kind, f.subject): f.object for f in question_set.worlds[q.corpus].facts}


def test_sizes():
    assert {name: len(s.questions) for name, s in REPORTED.items()} == {
        CONFLICT: 600,
        AGREE: 150,
        REMOVED: 150,
        MISLED: 150,
    }
    assert len(VALIDATION.questions) == 300 and len(RL.questions) == 8 * 30 * 3
    small = dataclasses.replace(TASK, conflict_questions=7, stratum_questions=2).reported()
    assert [len(small[s].questions) for s in STRATA] == [7, 2, 2, 2]


def test_countries_and_worlds_are_apart():
    assert len(TASK.heldout) == 10 and set(TASK.heldout) | set(TASK.training) == set(COUNTRIES)
    assert {q.meta["country"] for q in RL.questions} == set(TASK.training)
    for question_set in (VALIDATION, *REPORTED.values()):
        assert {q.meta["country"] for q in question_set.questions} <= set(TASK.heldout)
    names = [name for question_set in ALL.values() for name in question_set.worlds]
    assert len(names) == len(set(names))
    drawn = [tuple(sorted(w.objects.items())) for question_set in ALL.values() for w in question_set.worlds.values()]
    assert len(drawn) == len(set(drawn))
    ids = [q.id for question_set in ALL.values() for q in question_set.questions]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", ALL)
def test_meta_is_true_of_world_and_memory(name):
    question_set = ALL[name]
    for q in question_set.questions:
        world, meta = question_set.worlds[q.corpus], q.meta
        assert meta["capital"] == world.capitals[meta["country"]]
        assert meta["gold"] == world.objects[meta["relation"], meta["capital"]] and q.golds == (meta["gold"],)
        assert meta["prior_capital"] == MEMORY.capitals[meta["country"]]
        assert meta["prior_answer"] == MEMORY.objects[meta["relation"], meta["prior_capital"]]
        assert meta["prior_of_capital"] == MEMORY.objects[meta["relation"], meta["capital"]]
        assert meta["conflict"] == (meta["gold"] != meta["prior_answer"])
        assert meta["country"] in q.question


def test_rl_mixes_conflict_and_agreement():
    # Both facts are fresh with chance .7 * .7, so about half the questions conflict.
    assert 0.4 < RL.conflict_share < 0.62
    assert all(q.meta["stratum"] == (CONFLICT if q.meta["conflict"] else AGREE) for q in RL.questions)
    assert dataclasses.replace(TASK, stale=0.0).rl().conflict_share == 0.0
    assert {q.meta["split"] for q in RL.questions} == {"train"}


def test_conflict_sets_conflict_and_hold_their_gold_passages():
    for question_set in (VALIDATION, REPORTED[CONFLICT]):
        assert question_set.conflict_share == 1.0
        for q in question_set.questions:
            stated = _stated(question_set, q)
            assert [stated[fact] for fact in gold_facts(q)] == [q.meta["capital"], q.meta["gold"]]
            assert q.meta["capital"] != q.meta["prior_capital"] and q.meta["gold"] != q.meta["prior_of_capital"]


def test_agree_questions_agree_in_otherwise_redrawn_worlds():
    question_set = REPORTED[AGREE]
    assert question_set.conflict_share == 0.0
    for q in question_set.questions:
        stated = _stated(question_set, q)
        assert [stated[fact] for fact in gold_facts(q)] == [q.meta["prior_capital"], q.meta["prior_answer"]]
    for world in question_set.worlds.values():
        assert all(world.capitals[country] != MEMORY.capitals[country] for country in TASK.training)


def test_removed_worlds_lack_exactly_the_gold_passages():
    question_set = REPORTED[REMOVED]
    assert question_set.conflict_share == 1.0
    for q in question_set.questions:
        stated = _stated(question_set, q)
        assert not set(gold_facts(q)) & set(stated)
        assert all(fact.object != q.meta["gold"] for fact in question_set.worlds[q.corpus].facts)
    for world in question_set.worlds.values():
        missing = {(CAPITAL, c) for c in world.capitals} | set(world.objects)
        missing -= {(fact.kind, fact.subject) for fact in world.facts}
        heldout_cities = {world.capitals[country] for country in TASK.heldout}
        assert all(subject in TASK.heldout or subject in heldout_cities for _, subject in missing)


def test_misleading_worlds_hold_one_false_passage_a_question():
    question_set = REPORTED[MISLED]
    assert question_set.conflict_share == 1.0
    for q in question_set.questions:
        world = question_set.worlds[q.corpus]
        lies = [
            f
            for f in world.facts
            if (f.kind, f.subject, f.relation) == (MISLEADING, q.meta["capital"], q.meta["relation"])
        ]
        assert [lie.object for lie in lies] == [q.meta["misleading"]]
        assert q.meta["misleading"] not in (q.meta["gold"], q.meta["prior_answer"])
        assert lies[0].text().startswith("An old legend says")
        stated = _stated(question_set, q)
        assert [stated[fact] for fact in gold_facts(q)] == [q.meta["capital"], q.meta["gold"]]


def test_everything_is_fixed_by_the_seed():
    again = SyntheticTask(seed=5, warm_start_worlds=3)
    assert again.rl() == RL and again.reported() == REPORTED and again.validation() == VALIDATION
    other = SyntheticTask(seed=6)
    assert other.memory().objects != MEMORY.objects and other.heldout != TASK.heldout
    # A size changes no other set, and a larger set starts with the smaller one.
    assert dataclasses.replace(TASK, rl_worlds=2).validation() == VALIDATION
    assert dataclasses.replace(TASK, validation_questions=40).validation().questions == VALIDATION.questions[:40]


def test_all_relations_are_asked():
    for question_set in ALL.values():
        assert {q.meta["relation"] for q in question_set.questions} == set(RELATIONS)


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="stale"):
        SyntheticTask(stale=1.5)
    with pytest.raises(UserError, match="heldout_countries"):
        SyntheticTask(heldout_countries=40)
