"""Answer scores against hand-computed values, and the rules that public evaluators get wrong."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.rewards import scores

WORDS = st.lists(st.sampled_from(["a", "the", "An", "paris", "Paris,", "of", "1,000", "?", "yes", "no"]), max_size=6)
TEXT = st.one_of(st.text(max_size=20), WORDS.map(" ".join))


@pytest.mark.parametrize(
    ("text", "delete", "space"),
    [
        ("The  Eiffel\tTower!", "eiffel tower", "eiffel tower"),
        ("1,000", "1000", "1 000"),
        ("U.S.", "us", "u s"),
        ("A cat and an apple", "cat and apple", "cat and apple"),
        ("another theatre", "another theatre", "another theatre"),
        ("Jean-Luc's", "jeanlucs", "jean luc s"),
        ("the-end", "theend", "end"),
        ("Zürich, 東京", "zürich 東京", "zürich 東京"),
        ("The", "", ""),
        ("?!", "", ""),
    ],
)
def test_normalise_golden(text, delete, space):
    assert scores.normalise(text) == delete
    assert scores.normalise(text, "space") == space


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("the Paris.", ["London", "Paris"], 1.0),
        ("Paris France", ["Paris"], 0.0),
        ("1000", ["1,000"], 1.0),
        (None, ["Paris"], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_exact_match_golden(prediction, golds, expected):
    assert scores.exact_match(prediction, golds) == expected


@pytest.mark.parametrize("score", [scores.exact_match, scores.token_f1, scores.cover_match])
@pytest.mark.parametrize("prediction", ["", "the", "?", None, "a b"])
def test_empty_never_matches(score, prediction):
    assert score(prediction, ["A", "The", "", "!"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "gold", "options", "expected"),
    [
        ("new york city", "new york", {}, 0.8),  # 2 common; 2 * 2 / (3 + 2)
        ("new new york", "new york", {}, 0.8),
        ("new new york", "new york", {"tokens": "set"}, 1.0),
        ("new new york", "new new", {}, 0.8),
        ("yes it is", "yes", {}, 0.5),
        ("yes it is", "yes", {"yes_no_guard": True}, 0.0),
        ("yes", "yes", {"yes_no_guard": True}, 1.0),
        ("yes", "no", {"yes_no_guard": True}, 0.0),
        ("U.S. army", "us army", {}, 1.0),
        ("U.S. army", "us army", {"punctuation": "space"}, 0.4),  # u s army / us army
    ],
)
def test_f1_golden(prediction, gold, options, expected):
    assert scores.token_f1(prediction, [gold], **options) == pytest.approx(expected)


def test_f1_takes_the_best_gold():
    assert scores.token_f1("new york", ["boston", "new york city", "york"]) == pytest.approx(0.8)


def test_yes_no_guard_is_per_gold():
    assert scores.token_f1("yes", ["yes indeed", "yes"], yes_no_guard=True) == 1.0


def test_cover_is_a_substring():
    assert scores.cover_match("He lived in Paris, France", ["paris"]) == 1.0
    assert scores.cover_match("comparison", ["paris"]) == 1.0
    assert scores.cover_match("Paris", ["Paris France"]) == 0.0


def test_contains_tokens_needs_token_borders():
    assert scores.contains_tokens("lived in Paris, France", "paris france")
    assert not scores.contains_tokens("comparison", "paris")
    assert not scores.contains_tokens("a the", "The")


def test_bad_options_are_refused():
    with pytest.raises(UserError, match="punctuation='strip'"):
        scores.normalise("x", "strip")
    with pytest.raises(UserError, match="tokens='bag'"):
        scores.token_f1("x", ["x"], tokens="bag")
    with pytest.raises(UserError, match="one string"):
        scores.exact_match("x", "x")


@settings(deadline=None, max_examples=200)
@given(TEXT, st.sampled_from(["delete", "space"]))
def test_normalise_properties(text, punctuation):
    once = scores.normalise(text, punctuation)
    assert not set(once) & set(string.punctuation)
    assert not {"a", "an", "the"} & set(once.split())
    assert once == once.strip() and "  " not in once


@settings(deadline=None, max_examples=200)
@given(TEXT, st.lists(TEXT, max_size=3))
def test_scores_are_ordered(prediction, golds):
    em, f1 = scores.exact_match(prediction, golds), scores.token_f1(prediction, golds)
    assert 0.0 <= em <= f1 <= 1.0
    assert em <= scores.cover_match(prediction, golds)
    assert scores.token_f1(prediction, golds, yes_no_guard=True) <= f1
    assert scores.exact_match(prediction, [prediction]) == float(bool(scores.normalise(prediction)))


@settings(deadline=None, max_examples=200)
@given(WORDS.map(" ".join), WORDS.map(" ".join))
def test_f1_is_the_harmonic_mean(prediction, gold):
    """Against precision and recall counted by removing matched tokens one by one."""
    answer, rest = scores.normalise(prediction).split(), scores.normalise(gold).split()
    total, common = len(rest), 0
    for token in answer:
        if token in rest:
            rest.remove(token)
            common += 1
    expected = 0.0
    if common:
        precision, recall = common / len(answer), common / total
        expected = 2 * precision * recall / (precision + recall)
    assert scores.token_f1(prediction, [gold]) == pytest.approx(expected)
