"""Transcripts of three forms become the same prompt, actions and observations; what is left out is counted."""

import json

import numpy as np
import pytest

from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.errors import UserError
from cipo_jax.evaluation.transcript_tokens import (
    encode_transcript,
    supportive_passages,
    trajectories_of,
    write_transcripts,
)
from cipo_jax.evaluation.transcripts import read_transcript, read_transcripts
from cipo_jax.types import Role

DOCS = 'Doc 1(Title: "Valdoria") The capital is Brenavik.\nDoc 2(Title: "River") Doc 2 says nothing.'
RESPONSE = (
    "<think> a </think> <search> capital </search>\n\n<information>" + DOCS + "</information>\n\n"
    "<think> b </think> <answer> Brenavik </answer>"
)
OUTPUT = {"query": "Q: Which?\n", "final_response": RESPONSE}
RECORD = {"id": "q1", "question": "Which?", "golden_answers": ["Brenavik"], "output": OUTPUT}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def parts(record):
    return [(p.role, p.text, tuple(p.pieces[i] for i in p.passages)) for p in read_transcript(record).parts]


def response(text):
    return {"prompt": "Q", "response": text}


def test_search_r1_text_is_cut_where_the_writer_changes():
    prompt, search, observation, answer = parts(RECORD)
    assert prompt == (Role.PROMPT, "Q: Which?\n", ())
    assert search == (Role.ACTION, "<think> a </think> <search> capital </search>", ())
    first, second = DOCS.split("\n")
    assert observation == (Role.OBSERVATION, f"\n\n<information>{DOCS}</information>\n\n", (first, "\n" + second))
    assert answer == (Role.ACTION, "<think> b </think> <answer> Brenavik </answer>", ())


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("I know. <information>Doc 1(Title: x) y</information>\n<answer> z </answer>", "information_without_search"),
        ("<search> a </search>\n\n<information> </information>\n\n<answer> z </answer>", "information_empty"),
        ("<search> a </search> <information>I made this up</information> more", "information_written_by_the_model"),
        ("<search> a </search>\n\n<information>Doc 1(Title: x) cut off", "information_never_closed"),
    ],
)
def test_what_only_looks_like_evidence_is_counted_and_loses_no_text(text, remark):
    transcript = read_transcript(response(text))
    assert transcript.remarks == (remark,)
    assert not any(p.passages for p in transcript.parts)
    assert "".join(p.text for p in transcript.parts) == "Q" + text


def test_the_remark_on_an_invalid_action_is_the_environments():
    remark = "\nMy previous action is invalid. If I want to search, .. Let me try again.\n"
    _, first, said, second = parts(response("hm" + remark + "<answer> a </answer>"))
    assert (first[1], said[:2], second[1]) == ("hm", (Role.OBSERVATION, remark), "<answer> a </answer>")


def test_chat_messages_with_tool_results():
    call = {"function": {"name": "search", "arguments": {"query": "capital"}}}
    record = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": "let me look", "tool_calls": [call]},
            {"role": "tool", "content": "Valdoria: Brenavik"},
            {"role": "tool", "content": [{"type": "text", "text": "River: Ashawen"}]},
            {"role": "assistant", "content": "Brenavik"},
        ]
    }
    prompt, search, observation, answer = parts(record)
    assert prompt[1] == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    assert search[1] == (
        'let me look\n<tool_call>\n{"name": "search", "arguments": {"query": "capital"}}\n</tool_call><|im_end|>'
    )
    assert observation[1] == (
        "\n<|im_start|>user\n<tool_response>\nValdoria: Brenavik\n</tool_response>\n<tool_response>\nRiver: Ashawen\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert observation[2] == ("Valdoria: Brenavik", "River: Ashawen")
    assert answer == (Role.ACTION, "Brenavik<|im_end|>", ())


def test_spans_hold_the_passages_and_own_form_is_kept_token_for_token(tokenizer, tmp_path):
    row, skipped = encode_transcript(read_transcript(RECORD), tokenizer, 1000)
    assert not skipped
    t = trajectories_of([row])
    for text, span in zip(DOCS.split("\n"), t.passage_span[0, 0]):
        assert tokenizer.decode(t.tokens[0, slice(*span)].tolist()).strip() == tokenizer.decode(tokenizer.encode(text))
    assert t.content_span[0, 0].tolist() == [t.passage_span[0, 0, 0, 0], t.passage_span[0, 0, 1, 1]]
    start, end = t.evidence_span[0, 0]
    assert (t.role[0, start:end] == Role.OBSERVATION).all() and end == t.action_span[0, 1, 0]
    assert (t.action_span[0, 1, 1], t.turn[0].max()) == (t.length[0], 1)
    assert supportive_passages(t, [["brenavik"]], tokenizer)[0].tolist() == [[True, False], [False, False]]
    assert not supportive_passages(t, [[""]], tokenizer).any()

    write_transcripts(tmp_path / "own.jsonl", t, [{"id": "q1", "question": "Which?", "golds": ["Brenavik"]}])
    (again,), unreadable = read_transcripts(tmp_path / "own.jsonl")
    assert not unreadable and (again.id, again.golds) == ("q1", ("Brenavik",))
    own = trajectories_of([encode_transcript(again, None, 1000)[0]])
    for name, value in vars(t).items():
        assert np.array_equal(getattr(own, name), value), name


def test_what_does_not_fit_is_cut_at_a_border_and_counted(tokenizer):
    transcript = read_transcript(RECORD)
    whole, _ = encode_transcript(transcript, tokenizer, 1000)
    _, end = whole["action_span"][1]
    for limit in range(0, len(whole["tokens"])):
        row, skipped = encode_transcript(transcript, tokenizer, limit)
        n = len(row["tokens"])
        borders = [0, *(s for s, _ in whole["action_span"]), whole["evidence_span"][0][0]]
        assert n == max(b for b in borders if b <= limit)
        assert skipped["over_token_limit"] == 1
    assert encode_transcript(transcript, tokenizer, end)[1] == {}
    last = read_transcript(response(RESPONSE[: RESPONSE.index("<think> b")]))
    assert encode_transcript(last, tokenizer, 1000)[1] == {"no_next_action": 1}
    assert encode_transcript(read_transcript(response("")), tokenizer, 1000)[1] == {"no_action": 1}


def test_unreadable_records_are_reported_not_fatal(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(r)
            for r in (1, {"id": 3}, {"messages": [{"content": "x"}]}, {"tokens": [1], "role": [2]}, RECORD)
        )
    )
    transcripts, unreadable = read_transcripts(path)
    assert len(transcripts) == 1 and len(unreadable) == 4
    assert "no text as final_response" in unreadable[1] and unreadable[2].startswith("record 3: KeyError")
    assert "turn" in unreadable[3]
    path.write_text("[1")
    with pytest.raises(UserError, match="not JSON"):
        read_transcripts(path)
    path.write_text('{"a": 1}\nnonsense')
    with pytest.raises(UserError, match="line 2"):
        read_transcripts(path)


def test_real_trajectories_keep_every_character(shared):
    folder = shared / "data" / "search_r1_trajectories"
    counted = {}
    for name in ("nq_base_v0.json", "nq_base_v1.json"):
        transcripts, unreadable = read_transcripts(folder / name)
        records = json.loads((folder / name).read_text())
        assert not unreadable and len(transcripts) == len(records) == 1000
        for transcript, record in zip(transcripts, records):
            output = record["output"]
            assert "".join(p.text for p in transcript.parts) == output["query"] + output["final_response"]
        shown = [len(p.passages) for t in transcripts for p in t.parts if p.passages]
        counted[name] = len(shown), shown.count(3), sum(len(t.remarks) for t in transcripts)
    assert counted["nq_base_v1.json"] == (999, 997, 0)
    assert counted["nq_base_v0.json"][2] > 100  # natural malformed ones
