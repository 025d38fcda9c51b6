"""Published outcome rewards, row by row of their authors' tables."""

import pytest

from cipo_jax.errors import UserError
from cipo_jax.rewards import published
from cipo_jax.rewards.blocks import blocks, without_blocks

SEARCHED = "<search>q</search><information>Paris is big</information>"


def test_blocks():
    assert blocks("<a>x</a> <a>open <a> y\nz </a></a>", "a") == ["x", "y\nz"]
    assert blocks("<ab>x</ab>", "a") == []
    assert without_blocks("1<a>x</a>2<a>y</a>3<a>", "a") == "123<a>"


@pytest.mark.parametrize(
    ("text", "answer", "valid", "expected"),
    [
        (SEARCHED, "Paris", True, 1.0),
        (SEARCHED, "Paris", False, 0.8),
        (SEARCHED, "London", True, 0.3),
        ("<information>Rome</information> Paris", "London", True, 0.2),
        (SEARCHED, "London", False, 0.1),
        (SEARCHED, None, True, 0.3),
        ("", None, True, 0.2),
        (SEARCHED, None, False, 0.0),
    ],
)
def test_search_r1_structured(text, answer, valid, expected):
    got = published.search_r1_structured(text, answer, ["Paris"], valid, retrieval=0.1)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "valid", "expected"),
    [("Paris", True, 1.0), ("Paris", False, 0.0), ("London", True, 0.1), (None, True, 0.1), (None, False, 0.0)],
)
def test_research(answer, valid, expected):
    assert published.research("", answer, ["Paris"], valid) == expected


def test_research_guards_yes_and_no():
    assert published.research("", "yes it is", ["yes"], True) == 0.1


def test_r1_searcher():
    stage_one = [
        published.r1_searcher(text, None, ["x"], valid, stage=1) for text in (SEARCHED, "") for valid in (True, False)
    ]
    assert stage_one == [1.0, 0.5, 0.5, 0.0]
    assert published.r1_searcher("", "True", ["yes"], True) == 1.0
    assert published.r1_searcher("", "U.S. army", ["us army"], True) == pytest.approx(0.4)
    assert published.r1_searcher("", "x", ["x"], False) == -1.0
    assert published.r1_searcher("", None, ["x"], True, fault=-2.0) == -2.0
    assert published.r1_searcher("", "x " * 11, ["x"], True, max_answer_words=10) == -1.0
    with pytest.raises(UserError, match="stage=3"):
        published.r1_searcher("", "x", ["x"], True, stage=3)


def test_deepresearcher_takes_the_first_answer_outside_observations():
    text = "<information><answer>Rome</answer></information><answer>Paris Paris</answer><answer>London</answer>"
    assert published.deepresearcher(text, "London", ["Paris"], True) == 1.0
    assert published.deepresearcher(text, "London", ["London"], True) == 0.0
    assert published.deepresearcher(text, "London", ["Paris"], False) == -1.0
    assert published.deepresearcher("", None, ["Paris"], True) == -1.0


def test_autorefine():
    refined = "<information>Paris</information><refine>It is Paris.</refine>"
    assert published.autorefine(refined, "London", ["Paris"], False) == 0.1
    assert published.autorefine("<information>Paris</information>", "London", ["Paris"], True) == 0.0
    assert published.autorefine(refined, None, ["Paris"], True) == 0.0
    assert published.autorefine("", "Paris", ["Paris"], False) == 1.0


@pytest.mark.parametrize(
    ("searches", "answer", "valid", "expected"),
    [
        (0, "Paris", True, 1.6),
        (1, "Paris", True, 1.4),
        (2, "Paris", True, 1.2),
        (3, "Paris", True, 1.0),
        (5, "Paris", True, 1.0),
        (0, "London", True, 0.0),
        (2, "London", True, 0.05),
        (0, "Paris", False, -1.0),
        (0, None, True, -1.0),
    ],
)
def test_ikea(searches, answer, valid, expected):
    assert published.ikea(SEARCHED * searches, answer, ["Paris"], valid) == pytest.approx(expected)
