"""Outcome reward shapes, golden values and gin."""

import gin
import pytest

from cipo_jax.rewards.outcome import em, f1, f1_format


@pytest.mark.parametrize(
    ("answer", "format_valid", "expected_em", "expected_f1", "expected_format"),
    [
        ("Paris", True, 1.0, 1.0, 1.0),
        ("Paris", False, 1.0, 1.0, 1.0),  # the paper's shape rewards a right answer in a bad format
        ("Paris France", True, 0.0, 2 / 3, 2 / 3),
        ("London", True, 0.0, 0.0, 0.1),
        ("London", False, 0.0, 0.0, 0.0),
        (None, False, 0.0, 0.0, 0.0),
        ("", True, 0.0, 0.0, 0.1),
    ],
)
def test_golden(answer, format_valid, expected_em, expected_f1, expected_format):
    arguments = ("<answer>ignored</answer>", answer, ["Paris"], format_valid)
    assert em(*arguments) == expected_em
    assert f1(*arguments) == pytest.approx(expected_f1)
    assert f1_format(*arguments) == pytest.approx(expected_format)


def test_floor_is_neither_added_nor_a_minimum_for_positive_f1():
    twenty_words = "Paris x y z w v u t s r q p o n m l k j i h"
    assert f1_format("", twenty_words, ["Paris"], True) == pytest.approx(2 / 21)


def test_format_gates_f1_follows_the_released_code():
    assert f1_format("", "Paris", ["Paris"], False, format_gates_f1=True) == 0.0
    assert f1_format("", "Paris", ["Paris"], True, format_gates_f1=True) == 1.0


def test_gin_sets_options():
    gin.clear_config()
    try:
        gin.parse_config("f1_format.format_floor = 0.25\nf1.yes_no_guard = True")
        assert f1_format("", "London", ["Paris"], True) == 0.25
        assert f1("", "yes it is", ["yes"], True) == 0.0
    finally:
        gin.clear_config()
