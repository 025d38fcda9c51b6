"""Question files: what is read back, and what is refused by file and line."""

import json

import pytest

from cipo_jax.data.questions import Question, load_questions, save_questions
from cipo_jax.errors import UserError


def test_questions_survive_a_round_trip(tmp_path):
    questions = [
        Question("a", "Who founded Rome?", ("Romulus", "Romulus and Remus"), "wiki", {"hops": 1, "conflict": True}),
        Question("b", "東京は?\u2028", ("Tōkyō",)),
    ]
    save_questions(tmp_path / "q.jsonl", questions)
    loaded = load_questions(tmp_path / "q.jsonl")
    assert loaded == questions
    assert [dict(q.meta) for q in loaded] == [dict(q.meta) for q in questions]


def test_flashrag_rows_are_read(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"id": "test_0", "question": "who?", "golden_answers": ["x"]}\n\n{"question": "y?", "golden_answers": ["z"]}\n'
    )
    assert load_questions(path) == [Question("test_0", "who?", ("x",)), Question("1", "y?", ("z",))]


GOOD = {"id": "a", "question": "who?", "golden_answers": ["x"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (json.dumps(GOOD), "id 'a' was used on line 1"),
        (json.dumps({**GOOD, "id": "b", "golden_answers": []}), "golden_answers"),
        (json.dumps({**GOOD, "id": "b", "golden_answers": "x"}), "golden_answers"),
        (json.dumps({**GOOD, "id": "b", "golden_answers": [1]}), "golden_answers"),
        (json.dumps({"id": "b", "question": "who?"}), "golden_answers"),
        (json.dumps({**GOOD, "id": "b", "question": " "}), "question"),
        (json.dumps({**GOOD, "id": "b", "metadata": [1]}), "metadata"),
        ("[1]", "no JSON object"),
        ("{", "not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + row + "\n")
    with pytest.raises(UserError, match=message) as error:
        load_questions(path)
    assert f"{path}:2" in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl"):
        load_questions(tmp_path / "none.jsonl")
