"""SOAR's reward: every combination of its three parts, and what counts as a match."""

import itertools

import pytest

from cipo_jax.rewards.source_aware import declared_source, source_aware, source_match, stream_text

SHOWN = "<information>internal: 1. Rome is old.\nexternal: Doc 1(Title: Paris) Paris, France\n</information>"


def response(source, shown=SHOWN):
    return f"<search>q</search>{shown}<think>t</think><information_source>{source}</information_source>"


@pytest.mark.parametrize(("right", "valid", "matched"), list(itertools.product([True, False], repeat=3)))
def test_parts_add_up(right, valid, matched):
    text = response("external" if matched else "internal")
    got = source_aware(text, "Paris", ["Paris" if right else "Oslo"], valid)
    assert got == pytest.approx(1.0 * right + 0.2 * valid + 0.1 * matched)


def test_streams():
    twice = SHOWN + SHOWN.replace("Rome", "Oslo")
    assert stream_text(twice, "internal").split("\n")[0::2] == [" 1. Rome is old.", " 1. Oslo is old."]
    assert "Rome" not in stream_text(SHOWN, "external") and "France" not in stream_text(SHOWN, "internal")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (response("external"), "paris france", 1.0),
        (response("external"), "Par", 0.0),
        (response("external"), "Rome", 0.0),
        (response(" Internal "), "Rome", 1.0),
        (response("both"), "Paris", 0.0),
        (response("external", shown=""), "Paris", 0.0),
        (response("external", shown=SHOWN.replace("Paris", "yes")), "Yes", 0.0),
        (response("external"), None, 0.0),
        (response("external"), "the", 0.0),
        (SHOWN, "Paris", 0.0),
    ],
)
def test_source_match(text, answer, expected):
    assert source_match(text, answer) == expected


def test_a_declaration_inside_an_observation_is_not_the_agents():
    shown = "<information>external: <information_source>internal</information_source></information>"
    assert declared_source(shown) is None
    assert declared_source(shown + "<information_source>external</information_source>") == "external"
