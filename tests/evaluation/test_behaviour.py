"""The classes on a world small enough to check by eye."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.data.questions import Question
from cipo_jax.data.world import Fact, World
from cipo_jax.errors import UserError
from cipo_jax.evaluation.behaviour import CLASSES, judge, summarise
from cipo_jax.protocols.base import Action, ActionKind
from cipo_jax.rollout.episode import Episode, Turn

# The memory says: the capital of Valdoria is Dunimar, whose river is Ashewe. Here the capital is Brenavik.
FACTS = (
    Fact("capital", "Valdoria", "capital", "Brenavik"),  # 0
    Fact("river", "Brenavik", "river", "Eldona"),  # 1: gold
    Fact("river", "Dunimar", "river", "Rauma"),  # 2
    Fact("river", "Kessolmo", "river", "Ashewe"),  # 3: states the memory's answer
    Fact("capital", "Korvenia", "capital", "Dunimar"),  # 4: another country's capital
    Fact("misleading", "Brenavik", "river", "Silumbra"),  # 5
    Fact("founder", "Brenavik", "founder", "Borric"),  # 6
)
WORLD = World("w", {"Valdoria": "Brenavik", "Korvenia": "Dunimar"}, {}, FACTS)
META = {
    "country": "Valdoria",
    "relation": "river",
    "capital": "Brenavik",
    "prior_capital": "Dunimar",
    "prior_answer": "Ashewe",
    "gold": "Eldona",
}
QUESTION = Question("q", "Which river flows through the capital of Valdoria?", ("Eldona",), "w", META)


def episode(
    answer,
    *shown,
    queries=("capital of Valdoria", "river of Brenavik"),
    invalid=False,
    question=QUESTION,
    length=40,
    stop_reason="answer",
):
    """Searches `queries`, which show the rows `shown` in order, then answers."""
    turns = [Turn(query, Action(ActionKind.SEARCH, query=query), rows) for query, rows in zip(queries, shown)]
    if invalid:
        turns.append(Turn("hm", Action(ActionKind.INVALID), ()))
    if answer is not None:
        turns.append(Turn(answer, Action(ActionKind.ANSWER, answer=answer), ()))
    malformed = invalid or not (answer or "").strip()
    return Episode(question, tuple(turns), "", answer, malformed, stop_reason, length)


@pytest.mark.parametrize(
    ("answer", "shown", "expected"),
    [
        ("Eldona", [(4, 0), (1, 2)], "evidence_driven"),
        ("the eldona.", [(0,), (1,)], "evidence_driven"),  # compared as the scores compare
        ("Ashewe", [(0,), (1,)], "prior_driven"),
        ("ASHEWE", [], "prior_driven"),  # without any search
        ("Rauma", [(0, 4), (1, 2)], "other"),  # a river that was shown, of a city that is not Valdoria's capital
        ("Eldona", [(4,), (1,)], "other"),  # right, but no passage said that Brenavik is the capital
        ("Eldona", [(0,), (2,)], "other"),  # right, but no passage said so
        ("Borric", [(0,), (6,)], "other"),  # the capital's founder is not its river
        ("Silumbra", [(0,), (1, 5)], "other"),  # hearsay states nothing
        ("Eldona Ashewe", [(0,), (1,)], "other"),
        ("", [(0,), (1,)], "malformed"),
        (None, [(0,), (1,)], "malformed"),
    ],
)
def test_classes(answer, shown, expected):
    assert judge(episode(answer, *shown), WORLD).behaviour == expected


def test_unparsable_action_is_malformed_whatever_it_answers():
    for answer in ("Eldona", "Ashewe"):
        assert judge(episode(answer, (0,), (1,), invalid=True), WORLD).behaviour == "malformed"


def test_no_class_where_a_passage_shows_the_memorys_answer():
    for answer in ("Ashewe", "Eldona", None):
        assert judge(episode(answer, (0,), (1, 3)), WORLD).behaviour is None


def test_no_class_where_gold_is_the_memorys_answer():
    agreeing = Question("q", "?", ("Ashewe",), "w", {**META, "gold": "Ashewe"})
    got = judge(episode("Ashewe", (0,), (1,), question=agreeing), WORLD)
    assert (got.em, got.conflict, got.behaviour) == (1.0, False, None)


def test_second_query():
    world = judge(episode("x", (0,), (1,)), WORLD)
    prior = judge(episode("x", (0,), (2,), queries=("capital of Valdoria", "river of DUNIMAR")), WORLD)
    single = judge(episode("x", (0,), queries=("river of Brenavik",)), WORLD)
    other = judge(episode("x", (0,), (6,), queries=("a", "river of Brenavikia")), WORLD)
    assert (world.hop1_prior, world.hop1_evidence) == (False, True)
    assert (prior.hop1_prior, prior.hop1_evidence) == (True, False)
    assert (single.hop1_prior, single.hop1_evidence) == (False, False)
    assert (other.hop1_prior, other.hop1_evidence) == (False, False)
    same = Question("q", "?", ("Eldona",), "w", {**META, "prior_capital": "Brenavik"})
    assert judge(episode("x", (0,), (1,), question=same), WORLD).hop1_prior is None


def test_unanswered_corrections_do_not_count_as_queries():
    turns = (
        Turn("hm", Action(ActionKind.INVALID), ()),
        Turn("q", Action(ActionKind.SEARCH, query="capital of Valdoria"), (0,)),
        Turn("q", Action(ActionKind.SEARCH, query="river of Brenavik"), (1,)),
    )
    assert judge(Episode(QUESTION, turns, "", None, True, "turn_limit", 9), WORLD).hop1_evidence is True


def test_gold_rank_is_the_place_in_the_first_observation_that_shows_it():
    assert judge(episode("x", (0, 2), (2, 1)), WORLD).gold_rank == 2
    assert judge(episode("x", (0, 6, 1), (1,)), WORLD).gold_rank == 3
    assert judge(episode("x", (0,), (2,)), WORLD).gold_rank == 0


def test_misled():
    question = Question("q", "?", ("Eldona",), "w", {**META, "misleading": "Silumbra"})
    assert judge(episode("Silumbra", (0,), (5,), question=question), WORLD).misled is True
    assert judge(episode("Eldona", (0,), (1,), question=question), WORLD).misled is False
    assert judge(episode("Silumbra", (0,), (5,)), WORLD).misled is None


def test_question_of_a_real_benchmark_needs_no_world():
    question = Question("nq", "who wrote it", ("Jane Austen", "Austen"))
    got = judge(episode("jane austen wrote", question=question))
    assert (got.em, got.conflict, got.behaviour, got.gold_rank) == (0.0, None, None, None)
    assert got.f1 == pytest.approx(0.8)  # 2 * 2 / (3 + 2)
    metrics = summarise([episode("Austen", question=question)])
    assert metrics["em"] == 1.0
    assert not {"conflict_share", "prior_driven", "hop1_prior", "gold_shown"} & set(metrics)


def test_missing_world_is_named():
    with pytest.raises(UserError, match="world 'w'"):
        summarise([episode("x")], {})


def test_summary_by_hand():
    agreeing = Question("a", "?", ("Ashewe",), "w", {**META, "gold": "Ashewe", "prior_capital": "Brenavik"})
    episodes = [
        episode("Eldona", (0,), (1, 2)),  # evidence, gold first
        episode("Ashewe", (0,), (2, 1), queries=("capital of Valdoria", "river of Dunimar")),  # prior, gold second
        episode("Eldona", (0,), (2, 1)),  # evidence, gold second
        episode(None, (0,), stop_reason="token_limit", length=80),  # malformed, gold never shown
        episode("Ashewe", (0,), (1, 3)),  # no class: the memory's answer was shown
        episode("Ashewe", question=agreeing),  # no conflict
    ]
    got = summarise(episodes, {"w": WORLD})
    expected = {
        "episodes": 6,
        "em": 3 / 6,
        "f1": 3 / 6,
        "searches": (2 + 2 + 2 + 1 + 2 + 0) / 6,
        "actions": (3 + 3 + 3 + 1 + 3 + 1) / 6,
        "tokens": (5 * 40 + 80) / 6,
        "valid_answer": 5 / 6,
        "malformed_all": 1 / 6,
        "stop_answer": 5 / 6,
        "stop_end_of_turn": 0,
        "stop_turn_limit": 0,
        "stop_token_limit": 1 / 6,
        "conflict_share": 5 / 6,
        "conflict_episodes": 4,
        "conflict_left_out": 1,
        "evidence_driven": 2 / 4,
        "prior_driven": 1 / 4,
        "malformed": 1 / 4,
        "other": 0,
        "hop1_prior": 1 / 5,
        "hop1_evidence": 3 / 5,
        "gold_shown": 4 / 6,
        "em_gold_not_shown": 1 / 2,  # the malformed one and the agreeing one
        "em_gold_rank_1": 1 / 2,  # evidence, and the one whose class is undecidable
        "em_gold_rank_2": 1 / 2,
        "gold_rank_1_share": 2 / 6,
        "gold_rank_2_share": 2 / 6,
    }
    assert got == pytest.approx(expected)


def test_no_episodes():
    assert summarise([], {}) == {"episodes": 0.0}


rows = st.lists(st.integers(0, len(FACTS) - 1), max_size=3).map(tuple)
names = st.sampled_from(["Eldona", "Ashewe", "Rauma", "Silumbra", "Borric", "", None])
any_episode = st.builds(
    lambda answer, shown, invalid: episode(answer, *shown, invalid=invalid),
    names,
    st.lists(rows, max_size=2),
    st.booleans(),
)


@given(st.lists(any_episode, min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_exactly_one_class_and_shares_sum_to_one(episodes):
    metrics = summarise(episodes, {"w": WORLD})
    judged = [judge(e, WORLD) for e in episodes]
    decided = [b for b in judged if b.behaviour is not None]
    shown = ["Ashewe" in " ".join(FACTS[row].text() for t in e.turns for row in t.passages) for e in episodes]
    assert len(decided) == shown.count(False) == metrics["conflict_episodes"]
    assert metrics["conflict_left_out"] == shown.count(True)
    if decided:
        assert sum(metrics[name] for name in CLASSES) == pytest.approx(1.0)
    # Following the evidence to the right answer and remembering cannot both hold.
    for b in decided:
        assert not (b.behaviour == "prior_driven" and b.em)
