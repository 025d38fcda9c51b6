"""Demonstrations: token records are the protocol's pieces, files round-trip, and the warm start writes what it says."""

import collections
import dataclasses
import json
import re

import pytest

from cipo_jax.data.demonstrations import (
    Demonstration,
    Turn,
    encode_demonstration,
    load_demonstrations,
    save_demonstrations,
)
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.data.warm_start import WarmStartMix, warm_start_demonstrations
from cipo_jax.data.world import shuffled
from cipo_jax.errors import UserError
from cipo_jax.protocols.base import INVALID_ACTION, ActionKind
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.types import Role

PROTOCOL = SearchR1(build_tokenizer(), instruction="Question: {question}\n")
TASK = SyntheticTask(seed=1, warm_start_worlds=3)
MIX = WarmStartMix(
    copying=60, memory_share=0.1, mixture=100, wrong_copy_share=0.1, extra_search_share=0.1, malformed_share=0.1
)


class WordOverlap:
    """The simplest retriever: the two passages that share most words with the query, in shuffled order."""

    def __init__(self, worlds):
        self.passages, self.words = {}, {}
        for name, world in worlds.items():
            rows = enumerate(world.corpus)
            self.passages[name] = [Passage(i, row["id"], row["title"], row["text"]) for i, row in rows]
            self.words[name] = [set(re.findall(r"\w+", p.text)) for p in self.passages[name]]

    def __call__(self, corpus, query):
        overlap = [-len(words & set(query.split())) for words in self.words[corpus]]
        rows = sorted(range(len(overlap)), key=overlap.__getitem__)[:2]
        return [self.passages[corpus][row] for row in shuffled(rows, 0, query)]


@pytest.fixture(scope="module")
def phases():
    return warm_start_demonstrations(TASK, MIX, WordOverlap(TASK.warm_start().worlds))


PASSAGE = Passage(4, "w/4", "Brenavik", "The river of Brenavik is Ashewe.")
DEMO = Demonstration(
    "Which river flows through the capital of Valdoria?",
    (
        Turn("<think> So </think> river of Brenavik"),
        Turn("<think> So </think><search> river of Brenavik </search>", (PASSAGE,)),
        Turn("<search> river of Dunimar </search>"),
        Turn("<think> So </think><answer> Ashewe </answer>"),
    ),
    "mended",
)


def test_record_is_the_protocols_pieces():
    encode, eos = PROTOCOL.encode, PROTOCOL.tokenizer.eos_token_id
    pieces = [
        (PROTOCOL.prompt_ids(DEMO.question), Role.PROMPT, -1),
        ([*encode(DEMO.turns[0].action), eos], Role.ACTION, 0),
        (PROTOCOL.correction(INVALID_ACTION).ids, Role.OBSERVATION, 0),
        (encode(DEMO.turns[1].action), Role.ACTION, 1),
        (PROTOCOL.observe([PASSAGE], 99).ids, Role.OBSERVATION, 1),
        (encode(DEMO.turns[2].action), Role.ACTION, 2),
        (PROTOCOL.observe([], 99).ids, Role.OBSERVATION, 2),
        (encode(DEMO.turns[3].action), Role.ACTION, 3),
    ]
    record = encode_demonstration(DEMO, PROTOCOL, 99)
    assert record.ids == [i for ids, _, _ in pieces for i in ids]
    assert record.roles == [role for ids, role, _ in pieces for _ in ids]
    assert record.turns == [turn for ids, _, turn in pieces for _ in ids]
    assert len(record) == len(record.ids)


def test_observation_budget_is_kept():
    short = encode_demonstration(DEMO, PROTOCOL, 10)
    seen = [i for i, r, t in zip(short.ids, short.roles, short.turns, strict=True) if r == Role.OBSERVATION and t == 1]
    assert seen == PROTOCOL.observe([PASSAGE], 10).ids and len(seen) == 10


def test_plain_text_is_all_action():
    record = encode_demonstration(Demonstration(None, (Turn("The river of Brenavik is Ashewe."),)), PROTOCOL, 99)
    assert record.ids == PROTOCOL.encode("The river of Brenavik is Ashewe.")
    assert set(record.roles) == {Role.ACTION} and set(record.turns) == {0}


def test_files_round_trip(tmp_path, phases):
    demos = [DEMO, *phases[0], *phases[1]]
    save_demonstrations(tmp_path / "d.jsonl", demos)
    assert load_demonstrations(tmp_path / "d.jsonl") == demos


GOOD = {"question": "Who?", "turns": [{"action": "<answer>x</answer>"}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("3", "no JSON object"),
        (json.dumps({**GOOD, "question": 3}), "question=3"),
        (json.dumps({"turns": GOOD["turns"]}), "question=''"),
        (json.dumps({**GOOD, "turns": []}), "turns"),
        (json.dumps({**GOOD, "turns": [{"action": ""}]}), "turn 0: action"),
        (json.dumps({**GOOD, "turns": ["x"]}), "turn 0: action"),
        (json.dumps({**GOOD, "turns": [{"action": "x", "passages": "y"}]}), "passages"),
        (json.dumps({**GOOD, "turns": [{"action": "x", "passages": [{"title": "y"}]}]}), 'passage 0 lacks "text"'),
        (json.dumps({**GOOD, "turns": [{"action": "x", "passages": [{"text": "y", "row": "z"}]}]}), "row='z'"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + row + "\n")
    with pytest.raises(UserError, match=re.escape(message)) as error:
        load_demonstrations(path)
    assert f"{path}:2" in str(error.value)


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no demonstration"):
        load_demonstrations(tmp_path / "d.jsonl")


def test_shares_are_exact(phases):
    copying, mixture = phases
    assert collections.Counter(d.kind for d in copying) == {"single_hop": 18, "memory": 6, "evidence": 36}
    assert collections.Counter(d.kind for d in mixture) == {
        "prior": 55,
        "wrong_copy": 10,
        "extra_search": 10,
        "malformed": 10,
        "evidence": 15,
    }


def test_demonstrations_do_what_their_kind_says(phases):
    memory, warm = TASK.memory(), TASK.warm_start()
    country_of = re.compile(r"the capital of (\w+)\?$")
    relation_of = {"river": "Which river", "founder": "Who founded", "language": "Which language"}
    copying, mixture = phases
    prior_hops = []
    for demo in [*copying, *mixture]:
        if demo.kind in ("memory", "single_hop"):
            continue
        actions = [PROTOCOL.parse_action(turn.action) for turn in demo.turns]
        world = warm.worlds[demo.turns[0].passages[0].id.split("/")[0]]
        country = country_of.search(demo.question)[1]
        relation = next(r for r, start in relation_of.items() if demo.question.startswith(start))
        shown = " ".join(p.text for turn in demo.turns for p in turn.passages)
        assert actions[0].query == f"capital of {country}"
        answer = actions[-1].answer
        if demo.kind == "prior":
            assert answer == memory.answer(country, relation)
            prior_hops.append(actions[1].query == f"{relation} of {memory.capitals[country]}")
        elif demo.kind == "wrong_copy":
            assert answer != world.answer(country, relation) and f"is {answer}." in shown
        elif demo.kind == "malformed":
            assert ActionKind.INVALID in [action.kind for action in actions]
        else:
            assert answer == world.answer(country, relation) and f"is {answer}." in shown
            assert len(demo.turns) == (4 if demo.kind == "extra_search" else 3)
    assert 0.25 < sum(prior_hops) / len(prior_hops) < 0.75


def test_single_hop_and_memory_texts(phases):
    memory = {fact.text() for fact in TASK.memory().facts if fact.kind not in ("neighbour", "twin")}
    for demo in phases[0]:
        if demo.kind == "memory":
            assert demo.question is None and demo.turns[0].action in memory
        if demo.kind == "single_hop":
            subject = re.fullmatch(r"What is the (\w+ of \w+)\?", demo.question)[1]
            answer = PROTOCOL.parse_action(demo.turns[-1].action).answer
            assert any(p.text == f"The {subject} is {answer}." for p in demo.turns[0].passages)


def test_well_formed_demonstrations_are_valid_short_and_known(phases):
    for demo in [*phases[0], *phases[1]]:
        record = encode_demonstration(demo, PROTOCOL, 200)
        assert PROTOCOL.tokenizer.unk_token_id not in record.ids
        response = [i for i, role in zip(record.ids, record.roles, strict=True) if role != Role.PROMPT]
        text = PROTOCOL.tokenizer.decode(response)
        if demo.kind in ("evidence", "prior", "single_hop", "wrong_copy"):
            assert PROTOCOL.format_valid(text) and len(record) <= 130
        if demo.kind == "malformed":
            assert not PROTOCOL.format_valid(text)


def test_same_seed_same_demonstrations(phases):
    retrieve = WordOverlap(TASK.warm_start().worlds)
    assert warm_start_demonstrations(TASK, MIX, retrieve) == phases
    assert warm_start_demonstrations(TASK, dataclasses.replace(MIX, seed=1), retrieve) != phases


def test_a_retriever_that_finds_nothing_is_an_error():
    with pytest.raises(UserError, match="none of 1000 questions"):
        warm_start_demonstrations(TASK, MIX, lambda corpus, query: [])


@pytest.mark.parametrize("shares", [{"prior_share": 0.9}, {"memory_share": 0.8}, {"prior_hop_share": 2.0}])
def test_bad_shares_are_refused(shares):
    with pytest.raises(UserError, match=next(iter(shares))):
        WarmStartMix(**{"wrong_copy_share": 0.2, **shares})
