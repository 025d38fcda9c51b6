"""The scripted agents and the closed-book questions on a small synthetic task, with the real retriever and protocol."""

import numpy as np
import pytest

from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.evaluation import closed_book, scripted
from cipo_jax.evaluation.behaviour import summarise
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.rollout.episode import read_episodes
from cipo_jax.types import Role, StopReason, Trajectories

TASK = SyntheticTask(seed=3, validation_questions=24, conflict_questions=24, stratum_questions=24)


@pytest.fixture(scope="module")
def protocol():
    return SearchR1(build_tokenizer())


@pytest.fixture(scope="module")
def strata():
    return TASK.reported()


def retrievers(worlds):
    return {name: sparse_retriever(ListCorpus(world.corpus), order="shuffled") for name, world in worlds.items()}


def run(agent, split, protocol):
    episodes = scripted.run_scripted(agent, split.questions, split.worlds, retrievers(split.worlds), protocol, top_k=2)
    return episodes, summarise(episodes, split.worlds)


def test_ceiling_and_floor_on_conflict(strata, protocol):
    episodes, ceiling = run(scripted.oracle, strata["conflict"], protocol)
    assert ceiling["em"] == ceiling["evidence_driven"] == ceiling["hop1_evidence"] == 1.0
    assert ceiling["searches"] == 2.0 and ceiling["malformed_all"] == 0.0 and ceiling["stop_answer"] == 1.0
    assert all(protocol.format_valid(e.response) for e in episodes)
    _, floor = run(scripted.memory, strata["conflict"], protocol)
    assert floor["em"] == 0.0
    assert floor["prior_driven"] == floor["hop1_prior"] == 1.0
    assert floor["searches"] == 2.0


def test_other_strata(strata, protocol):
    _, agree = run(scripted.memory, strata["agree"], protocol)
    assert agree["em"] == 1.0 and agree["conflict_share"] == 0.0 and "prior_driven" not in agree
    episodes, removed = run(scripted.oracle, strata["removed"], protocol)
    assert removed["em"] == 0.0 and removed["evidence_driven"] == 0.0
    assert {len(e.turns) for e in episodes} == {2}  # the capital is not found, so it gives up after one search
    _, misled = run(scripted.oracle, strata["misleading"], protocol)
    assert misled["misled"] == 0.0
    assert misled["em"] >= 0.8  # hearsay may push the gold passage out of the two shown


def test_length_counts_prompt_actions_and_observations(strata, protocol):
    (episode, *_), _ = run(scripted.oracle, strata["conflict"], protocol)
    prompt = protocol.prompt_ids(episode.question.question)
    assert episode.length == len(prompt) + len(protocol.encode(episode.response))
    assert episode.response.endswith(f"<answer> {episode.question.golds[0]} </answer>")


def test_closed_book_questions():
    memory = TASK.memory()
    questions = closed_book.closed_book_questions(memory, TASK.heldout)
    assert len(questions) == 3 * len(TASK.heldout) == len({q.id for q in questions})
    for q in questions:
        assert q.golds == (memory.objects[q.meta["relation"], memory.capitals[q.meta["country"]]],)
    assert {q.corpus for q in questions} == {closed_book.CLOSED_BOOK}


def one_action(protocol, question, text):
    """The trajectory whose only action is `text`."""
    prompt, said = protocol.prompt_ids(question.question), protocol.encode(text)
    length = len(prompt) + len(said)
    spans, none = np.array([[[len(prompt), length]]]), np.zeros((1, 1, 2), int)
    role = np.array([[Role.PROMPT] * len(prompt) + [Role.ACTION] * len(said)])
    return Trajectories(
        tokens=np.array([prompt + said]),
        role=role,
        turn=np.where(role == Role.ACTION, 0, -1),
        behaviour_logprob=np.zeros((1, length)),
        length=np.array([length]),
        group=np.zeros(1, int),
        stop_reason=np.array([StopReason.ANSWER]),
        action_span=spans,
        evidence_span=none,
        content_span=none,
        passage_span=np.zeros((1, 1, 2, 2), int),
        passage_row=-np.ones((1, 1, 2), int),
    )


def test_answer_first_reads_the_opening_as_part_of_the_action(protocol):
    wrapped = closed_book.AnswerFirst(protocol)
    question = closed_book.closed_book_questions(TASK.memory())[0]
    gold = question.golds[0]
    assert wrapped.prompt_ids("x") == protocol.prompt_ids("x") + protocol.encode("<answer>")
    (episode,) = read_episodes(one_action(wrapped, question, f" {gold} </answer>"), [question], wrapped)
    assert (episode.answer, episode.malformed) == (gold, False)
    (open_ended,) = read_episodes(one_action(wrapped, question, f" {gold}"), [question], wrapped)
    assert (open_ended.answer, open_ended.malformed) == (None, True)
    score = closed_book.score_closed_book([episode, open_ended])
    assert (score.em.value, score.em.n, score.valid_answer) == (0.5, 2, 0.5)


def test_nothing_is_retrieved_closed_book(strata, protocol):
    retriever = closed_book.NoPassages()
    assert retriever.retrieve(["a", "b"], 2) == [[], []]
    with pytest.raises(IndexError):
        retriever.passage(0)
    split = strata["conflict"]
    empty = dict.fromkeys(split.worlds, retriever)
    episodes = scripted.run_scripted(scripted.memory, split.questions[:3], split.worlds, empty, protocol, top_k=2)
    assert [e.searches for e in episodes] == [0, 0, 0]
    assert "No passage was found." in episodes[0].response
    assert closed_book.score_closed_book(episodes).valid_answer == 1.0
    seen, _ = run(scripted.oracle, split, protocol)
    with pytest.raises(ValueError, match="saw passages"):
        closed_book.score_closed_book(seen)


def test_trajectories_say_what_was_written(strata, protocol):
    split = strata["conflict"]
    search = retrievers(split.worlds)
    demos = []
    for question in split.questions[:4]:
        turns = scripted.oracle(
            question, split.worlds[question.corpus], lambda q, c=question.corpus: search[c].retrieve([q], 2)[0]
        )
        demos.append(scripted.Demonstration(question.question, tuple(turns)))
    demos[1] = scripted.Demonstration(demos[1].question, demos[1].turns[:2])  # ends on a search
    got = scripted.demonstration_trajectories(demos, protocol, 400)
    decode = protocol.tokenizer.decode
    for b, demo in enumerate(demos):
        assert (got.role[b] != Role.PAD).sum() == got.length[b]
        for t, turn in enumerate(demo.turns):
            start, end = got.action_span[b, t]
            assert decode(got.tokens[b, start:end].tolist()) == turn.action
            start, end = got.evidence_span[b, t]
            if t + 1 == len(demo.turns):
                assert start == end == 0
                continue
            assert decode(got.tokens[b, start:end].tolist()).strip().startswith("<information>")
            for k, passage in enumerate(turn.passages):
                left, right = got.passage_span[b, t, k]
                assert passage.text in decode(got.tokens[b, left:right].tolist())
            low, high = got.content_span[b, t]
            assert (low, high) == (got.passage_span[b, t, 0, 0], got.passage_span[b, t, 1, 1])
            assert start < low < high < end
    assert got.stop_reason.tolist() == [StopReason.ANSWER, StopReason.TURN_LIMIT] + 2 * [StopReason.ANSWER]
    assert got.searches.tolist() == [2, 1, 2, 2]


def test_evidence_pairs_differ_in_their_last_action_alone(strata):
    split = strata["conflict"]
    pairs = scripted.evidence_pairs(split.questions, split.worlds, retrievers(split.worlds), top_k=2)
    assert len(pairs) == 2 * len(split.questions)  # every capital and every answer is redrawn
    for pair in pairs:
        meta = pair.question.meta
        assert pair.follow.turns[:-1] == pair.remember.turns[:-1]
        follow, remember = pair.follow.turns[-1].action, pair.remember.turns[-1].action
        named = ("gold", "prior_answer") if "<answer>" in follow else ("capital", "prior_capital")
        assert meta[named[0]] in follow and meta[named[1]] not in follow
        assert remember == follow.replace(meta[named[0]], meta[named[1]])
        shown = " ".join(p.text for p in pair.follow.turns[-2].passages)
        assert meta[named[0]] in shown and meta[named[1]] not in shown


def test_agreeing_facts_give_no_pairs(strata):
    split = strata["agree"]
    assert scripted.evidence_pairs(split.questions, split.worlds, retrievers(split.worlds), top_k=2) == []
