"""Rollouts of SmolLM2-135M-Instruct with real questions and passages against forced forwards over whole trajectories.

Four questions by default, which takes a minute; CIPO_ROLLOUT_QUESTIONS=64 asks more (a multiple of 4, 16 at a time).
"""

import os

import decoding
import jax
import numpy as np
import pytest
from plain import Plain, assert_row, row_key
from smollm2 import smollm2

from cipo_jax.data.questions import load_questions
from cipo_jax.data.tokenizer import model_tokenizer
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import FileCorpus, ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.rollout.engine import Rollout, RolloutConfig
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.score import Scorer

QUESTIONS = int(os.environ.get("CIPO_ROLLOUT_QUESTIONS", 4))
BATCH = min(QUESTIONS, 16)
KEY = jax.random.key(5)
CONFIG = RolloutConfig(
    max_turns=2,
    top_k=2,
    prompt_tokens=192,
    action_tokens=40,
    observation_tokens=160,
    total_tokens=576,
    query_tokens=40,
    chunk=64,
)
# A model this small searches only where it can copy the pattern.
INSTRUCTION = """\
Question: Who wrote the novel Dracula?
<search> author of Dracula </search>

<information>Doc 1(Title: Dracula) Dracula is an 1897 novel by the Irish author Bram Stoker.</information>

<answer> Bram Stoker </answer>

Question: What is the capital of Peru?
<search> capital of Peru </search>

<information>Doc 1(Title: Lima) Lima is the capital and largest city of Peru.</information>

<answer> Lima </answer>

Question: {question}
"""


@pytest.fixture(scope="module")
def world(shared):
    loaded = decoding.load(smollm2())
    passages = FileCorpus(shared / "data" / "wiki18_passages" / "wiki18_from_trajectories.jsonl")
    retriever = sparse_retriever(ListCorpus([passages.passage(i) for i in range(len(passages))]))
    protocol = SearchR1(model_tokenizer(smollm2()), instruction=INSTRUCTION)
    environment = Environment(protocol, {"default": retriever}, CONFIG.top_k, CONFIG.observation_tokens)
    rollout = Rollout(loaded.config, loaded.graph, CONFIG, environment, decoding.one_device())
    asked = load_questions(shared / "data" / "flashrag_subsample" / "nq_test.jsonl")
    asked = [q for q in asked if len(protocol.prompt_ids(q.question)) <= CONFIG.prompt_tokens][:QUESTIONS]
    assert len(asked) == QUESTIONS
    return loaded, rollout, Plain(loaded.graph, loaded.params, CONFIG, environment), asked


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_are_the_plain_ones(world, temperature):
    loaded, rollout, plain, asked = world
    temperature = np.float32(temperature)
    sampling = Sampling(temperature, np.int32(0), np.float32(1.0))
    scorer, gaps, searches, narrow, tokens, margins = jax.jit(Scorer(loaded.graph).__call__), [], 0, 0, 0, []
    for at in range(0, QUESTIONS, BATCH):
        part, key = asked[at : at + BATCH], jax.random.fold_in(KEY, at)
        trajectories = jax.device_get(rollout(loaded.params, part, 1, key, sampling)[0])
        if at == 0:
            difference = plain.logit_difference(trajectories.map(lambda x: x[:4]))
            bound = 5 * difference
            assert 0 < bound < 1e-2
        for b, question in enumerate(part):
            ids, roles = (x[b, : trajectories.length[b]] for x in (trajectories.tokens, trajectories.role))
            row, drawn = plain.replay(question, ids, roles, row_key(key, b, 0), temperature, pad=192)
            assert_row(trajectories, b, row)
            margin = np.asarray(row.margins)
            wrong = np.isfinite(margin) & (drawn != ids)
            assert (margin[wrong] < bound).all(), (at + b, margin[wrong])
            narrow += bool((margin < bound).any())
            tokens += int(np.isfinite(margin).sum())
            margins.append(margin.min())
        searches += int(trajectories.searches.sum())
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)) if temperature else ():
            t = trajectories.map(lambda x, half=half: x[half])
            scored = np.asarray(scorer(loaded.params, t.tokens, t.length, t.action_mask, temperature)[0])
            gaps.append(np.abs(scored - t.behaviour_logprob).max())
    print(
        f"temperature {temperature}: {QUESTIONS} rows, {tokens} sampled tokens, {searches} searches, logits differ by up to "
        f"{difference:.2e}; {narrow} rows with a decision narrower than {bound:.2e} (narrowest {min(margins):.2e}); "
        f"log-probs and the scorer's differ by up to {max(gaps, default=0):.2e}"
    )
    assert narrow <= 0.05 * QUESTIONS + (QUESTIONS < 20)
    assert searches >= QUESTIONS / 2
    assert max(gaps, default=0) < 1e-4
