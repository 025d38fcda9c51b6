"""Sample files: the text is the trajectory's, escaped; colour follows the sign of the evidence's effect."""

import dataclasses
import html
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cipo_jax.data.questions import Question
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.data.world import Fact, World
from cipo_jax.evaluation import scripted
from cipo_jax.evaluation.behaviour import judge
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.rollout.episode import read_episodes
from cipo_jax.training import samples
from cipo_jax.types import Role

META = {
    "country": "Valdoria",
    "relation": "river",
    "capital": "Brenavik",
    "prior_capital": "Dunimar",
    "prior_answer": "Ashewe",
    "gold": "Eldona",
}
WORLD = World(
    "w",
    {"Valdoria": "Brenavik"},
    {("river", "Brenavik"): "Eldona"},
    (Fact("capital", "Valdoria", "capital", "Brenavik"), Fact("river", "Brenavik", "river", "Eldona")),
)
QUESTIONS = [
    Question(f'w/<b>"{i}"', "Which river flows through the capital of Valdoria?", ("Eldona",), "w", META)
    for i in range(3)
]


@pytest.fixture(scope="module")
def batch():
    protocol = SearchR1(build_tokenizer())
    retriever = sparse_retriever(ListCorpus(WORLD.corpus))

    def search(query):
        return retriever.retrieve([query], 2)[0]

    agents = (scripted.oracle, scripted.memory, scripted.oracle)
    demos = [scripted.Demonstration(q.question, tuple(agent(q, WORLD, search))) for q, agent in zip(QUESTIONS, agents)]
    trajectories = scripted.demonstration_trajectories(demos, protocol, 400)
    return trajectories, read_episodes(trajectories, QUESTIONS, protocol), protocol.tokenizer


def plain(fragment):
    """What a reader sees."""
    return html.unescape(re.sub(r"<[^>]*>", "", fragment))


def test_file_shows_every_block_once(batch, tmp_path):
    trajectories, episodes, tokenizer = batch
    judged = [judge(episode, WORLD) for episode in episodes]
    path = samples.write_samples(
        tmp_path / "new" / "step.html", "step 1 <x>", trajectories, episodes, tokenizer, behaviours=judged, limit=2
    )
    found = samples.read_samples(path)
    assert list(found) == [q.id for q in QUESTIONS[:2]]
    assert [behaviour for behaviour, _ in found.values()] == ["evidence_driven", "prior_driven"]
    page = path.read_text()
    assert "step 1 &lt;x&gt;" in page and "src=" not in page and "href=" not in page
    text = plain(found[QUESTIONS[0].id][1])
    for turn in episodes[0].turns:
        assert text.count(turn.text) == 1
    assert text.count("2 passages retrieved") == 2 and text.count("action 3") == 1
    assert "EALR" not in page
    assert "memory says Ashewe" in text and "gold Eldona" in text


def test_colour_follows_the_evidence(batch, tmp_path):
    trajectories, episodes, tokenizer = batch
    ealr = np.where(trajectories.role == Role.ACTION, 0.0, 9.0)  # off-action values must not matter
    start, end = trajectories.action_span[0, 2]
    ealr[0, start], ealr[0, start + 1] = 2.0, -8.0
    start_first = trajectories.action_span[0, 0, 0]
    ealr[0, start_first] = 5.0  # the first action follows no evidence
    path = samples.write_samples(tmp_path / "s.html", "t", trajectories, episodes, tokenizer, token_ealr=ealr, limit=1)
    (_, fragment) = samples.read_samples(path)[QUESTIONS[0].id]
    spans = re.findall(r'<span style="background:rgba\((.*?)\)" title="(.*?)">(.*?)</span>', fragment)
    first, second = (tokenizer.decode([int(i)]) for i in trajectories.tokens[0, start : start + 2])
    assert spans == [
        ("9,105,218,0.35", "+2.00 nats", html.escape(first)),  # half the nats, half of .7
        ("219,109,40,0.70", "-8.00 nats", html.escape(second)),  # capped at full colour
    ]
    assert f"EALR {-6 / (end - start):+.2f} nats per token" in plain(fragment)
    assert plain(fragment).count("EALR") == 2
    assert plain(fragment).count(episodes[0].turns[2].text) == 1


def test_token_texts_keep_characters_that_span_tokens():
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(byte_tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tokenizer("aé 🜂b")["input_ids"]
    assert samples.token_texts(ids, tokenizer) == ["a", "", "é", " ", "", "", "", "🜂", "b"]
    assert samples.token_texts(ids[:2], tokenizer) == ["a", "\ufffd"]  # cut inside a character


def test_nan_is_not_coloured(batch, tmp_path):
    trajectories, episodes, tokenizer = batch
    ealr = np.full(trajectories.tokens.shape, np.nan)
    one = dataclasses.replace(episodes[0])
    path = samples.write_samples(tmp_path / "s.html", "t", trajectories, [one], tokenizer, token_ealr=ealr)
    assert "rgba" not in samples.read_samples(path)[QUESTIONS[0].id][1].split("</style>")[1]
