"""The compiled rollout equals a plain one: full forward per token, text search for stops, synchronous retrieval."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_world import CONFIG, questions

from cipo_jax.errors import UserError
from cipo_jax.models.attention import PackedContext, Visibility
from cipo_jax.protocols.base import INVALID_ACTION, RETRIEVAL_FAILED, ActionKind
from cipo_jax.rollout.episode import read_episodes
from cipo_jax.rollout.sampling import Sampling, sample
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Role, StopReason

KEY = jax.random.key(7)
SAMPLES = 4


_PROGRAMS = {}


def next_token_of(graph):
    """The next token by one forward over the whole row, compiled once."""

    def next_token(params, ids, n, key, sampling):
        model = nnx.merge(graph, params)
        positions = jnp.arange(CONFIG.total_tokens, dtype=jnp.int32)[None]
        hidden, _ = model(ids[None], positions, PackedContext(Visibility.causal(positions < n), 512))
        token, logprob = sample(model.logits(hidden[:, n - 1]), key[None], sampling, CONFIG.sampler)
        return token[0], logprob[0]

    return _PROGRAMS.setdefault("next_token", jax.jit(next_token))


def plain_rollout(setting, question, q, s, sampling, c=CONFIG):
    """One trajectory the obvious way; returns ids, roles, log-probs, stop reason and spans."""
    protocol, retriever = setting.environment.protocol, setting.environment.retrievers["default"]
    key = jax.random.fold_in(jax.random.fold_in(KEY, q), s)
    next_token = next_token_of(setting.graph)
    ids = list(protocol.prompt_ids(question.question))
    roles, logprobs = [Role.PROMPT] * len(ids), [0.0] * len(ids)
    spans = {"action": [], "evidence": [], "content": []}
    for turn in range(c.max_turns + 1):
        start = len(ids)
        while True:
            padded = np.pad(np.asarray(ids, np.int32), (0, c.total_tokens - len(ids)))
            token, logprob = next_token(setting.params, padded, len(ids), jax.random.fold_in(key, len(ids)), sampling)
            ids.append(int(token))
            roles.append(Role.ACTION)
            logprobs.append(float(logprob))
            text = protocol.tokenizer.decode(ids[start:])
            stops = sorted((text.find(stop), stop) for stop in protocol.stop_strings if stop in text)
            silent = ids[-1] in protocol.end_of_turn_ids or len(ids) - start >= c.action_tokens
            if stops or silent or len(ids) >= c.total_tokens:
                break
        spans["action"].append((start, len(ids)))
        spans["evidence"].append((0, 0))
        spans["content"].append((0, 0))
        if stops and stops[0][1] in protocol.terminal_stops:
            return ids, roles, logprobs, StopReason.ANSWER, spans
        if len(ids) >= c.total_tokens:
            return ids, roles, logprobs, StopReason.TOKEN_LIMIT, spans
        if turn == c.max_turns:
            return ids, roles, logprobs, StopReason.TURN_LIMIT, spans
        budget = min(c.total_tokens - 1 - len(ids), c.observation_tokens)
        action = protocol.parse_action(protocol.tokenizer.decode(ids[start:][-c.query_tokens :]))
        if stops and action.kind is ActionKind.SEARCH:
            try:
                seen = protocol.observe(retriever.retrieve([action.query], c.top_k)[0], budget)
            except Exception:
                seen = protocol.correction(RETRIEVAL_FAILED)
        else:
            seen = protocol.correction(INVALID_ACTION)
        if not seen.ids or len(seen.ids) > budget:
            return ids, roles, logprobs, StopReason.TOKEN_LIMIT, spans
        if seen.content[1] > seen.content[0]:
            spans["evidence"][-1] = (len(ids), len(ids) + len(seen.ids))
            spans["content"][-1] = tuple(len(ids) + x for x in seen.content)
        ids += seen.ids
        roles += [Role.OBSERVATION] * len(seen.ids)
        logprobs += [0.0] * len(seen.ids)


def assert_equal_to_plain(setting, trajectories, asked, sampling):
    reasons = set()
    for b in range(len(trajectories)):
        q, s = divmod(b, SAMPLES)
        ids, roles, logprobs, reason, spans = plain_rollout(setting, asked[q], q, s, sampling)
        n = trajectories.length[b]
        assert trajectories.tokens[b, :n].tolist() == ids
        assert trajectories.role[b].tolist() == roles + [Role.PAD] * (CONFIG.total_tokens - n)
        np.testing.assert_allclose(trajectories.behaviour_logprob[b, :n], logprobs, atol=1e-4)
        assert trajectories.stop_reason[b] == reason
        for name, values in spans.items():
            got = getattr(trajectories, f"{name}_span")[b]
            assert got[: len(values)].tolist() == [list(v) for v in values]
            assert not got[len(values) :].any()
        reasons.add(int(reason))
    return reasons


def useful_forwards(setting, trajectories, asked):
    """Prompts once per question, all observations, all sampled tokens but each trajectory's last."""
    prompts = sum(len(setting.environment.protocol.prompt_ids(q.question)) for q in asked)
    own = np.isin(trajectories.role, (Role.ACTION, Role.OBSERVATION)).sum()
    return prompts + own - len(trajectories)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_equal_to_the_plain_rollout(setting, temperature):
    one = setting()
    asked = questions(8)
    sampling = Sampling(np.float32(temperature), np.int32(0), np.float32(1.0))
    trajectories, counters = one.rollout()(one.params, asked, SAMPLES, KEY, sampling)
    trajectories = jax.device_get(trajectories)
    reasons = assert_equal_to_plain(one, trajectories, asked, sampling)
    if temperature:
        assert {StopReason.ANSWER, StopReason.TURN_LIMIT} <= reasons
        assert trajectories.searches.sum() > 3

    assert int(counters["forwarded_tokens"]) == useful_forwards(one, trajectories, asked)

    # The scorer reads the same log-probs.
    if temperature:
        scored = jax.jit(Scorer(one.graph).__call__)(
            one.params, trajectories.tokens, trajectories.length, trajectories.action_mask, np.float32(temperature)
        )[0]
        np.testing.assert_allclose(scored, trajectories.behaviour_logprob, atol=1e-4)


def test_truncated_sampling_reports_the_distribution_it_drew_from(setting):
    one = setting()
    sampling = Sampling(np.float32(0.9), np.int32(5), np.float32(0.8))
    asked = questions(3)
    trajectories = jax.device_get(one.rollout()(one.params, asked, SAMPLES, KEY, sampling)[0])
    assert_equal_to_plain(one, trajectories, asked, sampling)
    assert (trajectories.behaviour_logprob[trajectories.action_mask] > np.log(1 / 6)).mean() > 0.3


def test_changing_sampling_compiles_nothing(setting):
    one = setting()
    rollout = one.rollout()
    for temperature, top_k, top_p in [(1.0, 0, 1.0), (0.3, 4, 0.9), (0.0, 0, 1.0)]:
        sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))
        rollout(one.params, questions(4), 2, jax.random.key(0), sampling)
    assert rollout._program._cache_size() == 1


def test_episodes_read_back_what_happened(setting):
    one = setting()
    asked = questions(8)
    sampling = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))
    trajectories = jax.device_get(one.rollout()(one.params, asked, SAMPLES, KEY, sampling)[0])
    episodes = read_episodes(trajectories, [q for q in asked for _ in range(SAMPLES)], one.environment.protocol)
    for b, episode in enumerate(episodes):
        assert episode.searches == trajectories.searches[b]
        assert episode.malformed or episode.answer
        assert episode.stop_reason == StopReason.NAMES[int(trajectories.stop_reason[b])]
        if episode.answer is not None:
            assert (
                f"<answer>{episode.answer}" in episode.response.replace(" ", "").replace("\n", "")
                or " " in episode.answer
            )


def test_bad_sizes_are_told(setting):
    one = setting(2)
    with pytest.raises(UserError, match="3 questions does not divide over 2"):
        one.rollout()(one.params, questions(3), 1, KEY, Sampling())
    with pytest.raises(UserError, match="prompt_tokens=3"):
        one.rollout(prompt_tokens=3)(one.params, questions(4), 1, KEY, Sampling())
