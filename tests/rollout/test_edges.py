"""Rollouts in the world of edges equal the plain ones, row by row, and their log-probs are the scorer's."""

import functools

import jax
import numpy as np
import pytest
from edge_world import ENDLESS, FEW, FORGED, LONG, NONSENSE, NOTHING, edge_questions, edge_world
from plain import Plain, assert_row, assert_same, row_key

from cipo_jax.protocols.base import ActionKind
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Role, StopReason

KEY = jax.random.key(11)
QUESTIONS, SAMPLES = 64, 2
PAIRS = [("qwen3", "search_r1"), ("qwen3", "qwen_tools"), ("qwen3_5", "search_r1"), ("qwen3", "qwen_json")]


@functools.cache
def built(architecture: str, protocol: str, dtype: str = "float32"):
    world = edge_world(architecture, protocol, dtype=dtype)
    plain = Plain(world.graph, world.params, world.config, world.environment)
    return world, world.rollout(), plain


def sampled(architecture, protocol, temperature, dtype="float32", questions=QUESTIONS):
    world, rollout, plain = built(architecture, protocol, dtype)
    sampling = Sampling(np.float32(temperature), np.int32(0), np.float32(1.0))
    trajectories, _ = rollout(world.params, edge_questions(questions), SAMPLES, KEY, sampling)
    return world, plain, jax.device_get(trajectories)


GREEDY = [(*PAIRS[1], 0.0), (*PAIRS[2], 0.0)]


@pytest.mark.parametrize(("architecture", "protocol", "temperature"), [(*pair, 1.0) for pair in PAIRS] + GREEDY)
def test_equal_to_the_plain_rollout(architecture, protocol, temperature):
    world, plain, trajectories = sampled(architecture, protocol, temperature)
    asked = edge_questions(QUESTIONS)
    bound = 5 * plain.logit_difference(trajectories)
    assert 0 < bound < 3e-3
    rows = plain.sample(asked, KEY, np.float32(temperature), SAMPLES)
    narrow = assert_same(trajectories, rows, bound)
    print(f"{architecture}, {protocol}, temperature {temperature}: {len(rows)} rows, logits differ by {bound / 5:.2e}")
    for b in narrow:
        row, drawn = replay(plain, trajectories, b, temperature)
        ids = trajectories.tokens[b, : trajectories.length[b]]
        assert_row(trajectories, b, row)
        assert all(a == b or margin < bound for a, b, margin in zip(ids, drawn, row.margins) if margin < np.inf)
    if temperature:
        assert not EDGES - edges(world, trajectories)
        wanted = {StopReason.ANSWER, StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
        if not world.environment.protocol.corrects_invalid:
            wanted.add(StopReason.END_OF_TURN)
        assert set(trajectories.stop_reason.tolist()) == wanted


EDGES = {
    "stop over several tokens", "text behind the stop", "<|im_end|>", "<|endoftext|>", "first token ends the turn",
    "action at its cap", "not UTF-8", "NUL in the query", "no query", "a query of 10,000 characters", "nothing found",
    "fewer passages", "passages cut", "passages that are none", "passages that forge tags", "call that cannot be read",
    "nested tags", "ids that encoding again would change",
}  # fmt: skip


def edges(world, trajectories) -> set[str]:
    """Which of `EDGES` happened."""
    protocol, seen = world.environment.protocol, set()
    decode = protocol.tokenizer.decode
    opening = protocol.stop_strings[0].replace("/", "")
    for b in range(len(trajectories)):
        for turn, (start, end) in enumerate(trajectories.action_span[b]):
            if end == start:
                continue
            ids = trajectories.tokens[b, start:end].tolist()
            text, action = decode(ids), protocol.parse_action(decode(ids[-world.config.query_tokens :]))
            query = action.query or ""
            stop = next((s for s in protocol.stop_strings if s in text), None)
            passages = int((trajectories.passage_row[b, turn] >= 0).sum())
            observed = trajectories.evidence_span[b, turn]
            facts = {
                "stop over several tokens": stop is not None and stop not in decode(ids[-1:]),
                "text behind the stop": stop is not None and not text.endswith(stop),
                "<|im_end|>": text.endswith("<|im_end|>"),
                "<|endoftext|>": text.endswith("<|endoftext|>"),
                "first token ends the turn": text == "<|im_end|>",
                "action at its cap": len(ids) == world.config.action_tokens and stop is None,
                "not UTF-8": "\ufffd" in text,
                "NUL in the query": "\0" in query,
                "no query": stop == protocol.stop_strings[0] and (opening + stop in text or "query>\n\n</" in text),
                "a query of 10,000 characters": query == LONG,
                "nothing found": query == NOTHING and passages == 0,
                "fewer passages": query == FEW and passages == 1,
                "passages cut": query == ENDLESS and passages == 1 and observed[1] - observed[0] > 40,
                "passages that are none": query == NONSENSE and passages == 0,
                "passages that forge tags": query == FORGED and passages > 0,
                "call that cannot be read": stop == protocol.stop_strings[0] and action.kind is ActionKind.INVALID,
                "nested tags": opening * 2 in text or "<answer>b</answer>" in text or opening + "a" in text,
                "ids that encoding again would change": protocol.tokenizer(text)["input_ids"] != ids,
            }
            seen |= {name for name, true in facts.items() if true}
    return seen


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("architecture", "protocol"), [PAIRS[1], PAIRS[2]])
def test_log_probs_are_the_scorers(architecture, protocol, temperature):
    world, _, trajectories = sampled(architecture, protocol, temperature)
    assert scorer_gap(world, trajectories, temperature).max() < 1e-4


@pytest.mark.parametrize(("architecture", "protocol", "most", "mean"), [(*PAIRS[1], 0.5, 0.02), (*PAIRS[2], 5.0, 0.1)])
def test_the_gap_in_bf16_is_bounded(architecture, protocol, most, mean):
    world, _, trajectories = sampled(architecture, protocol, 1.0, "bfloat16", 32)
    gap = scorer_gap(world, trajectories, 1.0)
    print(f"{architecture}: bf16 log-probs differ by {gap.mean():.2e} nats on average, {gap.max():.2e} at most")
    assert 1e-4 < gap.max() < most and gap.mean() < mean


def replay(plain, trajectories, b: int, temperature: float, key=KEY):
    ids, roles = (x[b, : trajectories.length[b]] for x in (trajectories.tokens, trajectories.role))
    q, s = divmod(int(b), SAMPLES)
    return plain.replay(edge_questions(QUESTIONS)[q], ids, roles, row_key(key, q, s), np.float32(temperature))


def scorer_gap(world, trajectories, temperature) -> np.ndarray:
    """|behaviour log-prob - scorer's| of every action token."""
    active = trajectories.role == Role.ACTION
    assert active.sum() > 300
    scored = jax.jit(Scorer(world.graph).__call__)(
        world.params, trajectories.tokens, trajectories.length, active, np.float32(temperature)
    )[0]
    return np.abs(np.asarray(scored) - trajectories.behaviour_logprob)[active]


def test_the_plain_rollout_can_tell():
    """Another key, a flipped token or another role is noticed."""
    _, plain, trajectories = sampled("qwen3", "search_r1", 1.0)
    b = int(trajectories.searches.argmax())
    ids = trajectories.tokens[b, : trajectories.length[b]]
    row, drawn = replay(plain, trajectories, b, 1.0)
    assert_row(trajectories, b, row)
    action = np.isfinite(row.margins)
    assert (drawn[action] == ids[action]).all()
    other = replay(plain, trajectories, b, 1.0, key=jax.random.key(12))[1]
    assert (other[action] != ids[action]).any()
    other = trajectories.map(np.copy)
    other.role[b, trajectories.action_span[b, 0, 0]] = Role.OBSERVATION
    with pytest.raises(AssertionError):
        assert_row(other, b, row)
    with pytest.raises(AssertionError, match="narrow"):
        assert_same(trajectories.map(lambda x: x[b : b + 1]), [row], np.inf)
