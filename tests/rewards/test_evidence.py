"""EALR against a token-by-token loop, a KL identity, and the options that make it a turn reward."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.rewards import evidence
from cipo_jax.rewards.evidence import EvidenceConfig
from cipo_jax.types import Role, Trajectories


def trajectories(rows, turns, length=None):
    """Rows of `(action tokens, evidence tokens)` per turn; evidence 0 means none, else one tag token on either side."""
    length = length or 2 + sum(a + (e + 2 if e else 0) for row in rows for a, e in row)
    count = len(rows)
    role, turn = np.zeros((count, length), np.int8), np.full((count, length), -1, np.int8)
    spans = {name: np.zeros((count, turns, 2), np.int32) for name in ("action", "evidence", "content")}
    end = np.zeros(count, np.int32)
    for b, row in enumerate(rows):
        at = 2
        role[b, :at] = Role.PROMPT
        for t, (action, content) in enumerate(row):
            spans["action"][b, t] = at, at + action
            role[b, at : at + action], turn[b, at : at + action] = Role.ACTION, t
            at += action
            if content:
                spans["evidence"][b, t], spans["content"][b, t] = (at, at + content + 2), (at + 1, at + content + 1)
                role[b, at : at + content + 2], turn[b, at : at + content + 2] = Role.OBSERVATION, t
                at += content + 2
        end[b] = at
    return Trajectories(
        tokens=np.ones((count, length), np.int32),
        role=role,
        turn=turn,
        behaviour_logprob=np.zeros((count, length), np.float32),
        length=end,
        group=np.zeros(count, np.int32),
        stop_reason=np.ones(count, np.int32),
        action_span=spans["action"],
        evidence_span=spans["evidence"],
        content_span=spans["content"],
        passage_span=np.zeros((count, turns, 1, 2), np.int32),
        passage_row=np.full((count, turns, 1), -1, np.int32),
    )


def test_ealr_golden():
    batch = trajectories([[(2, 3), (2, 0)], [(1, 0), (2, 1)]], turns=3, length=12)
    # Row 0: prompt 0-1, action 2-3, observation 4-8, action 9-10.
    visible, masked = np.full((2, 12), np.nan, np.float32), np.zeros((2, 12), np.float32)
    visible[0, 9:11], masked[0, 9:11] = [-1.0, -2.0], [-3.0, -2.5]
    value, valid = jax.jit(evidence.ealr)(visible, masked, batch)
    # Row 1 has no evidence before its second action, and nothing after its last evidence.
    np.testing.assert_array_equal(valid, [[False, True, False], [False] * 3])
    np.testing.assert_allclose(value, [[0.0, 1.25, 0.0], [0.0] * 3])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_ealr_against_a_loop(data):
    row = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=4)
    rows = data.draw(st.lists(row, min_size=2, max_size=2))
    batch = trajectories(rows, turns=4, length=40)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    visible, masked = rng.normal(size=(2, 2, 40)).astype(np.float32)
    value, valid = evidence.ealr(visible, masked, batch)
    for b, t in itertools.product(range(2), range(4)):
        defined = t > 0 and t < len(rows[b]) and rows[b][t - 1][1] > 0 and rows[b][t][0] > 0
        assert bool(valid[b, t]) == defined
        expected = 0.0
        if defined:
            start, end = batch.action_span[b, t]
            expected = sum(float(visible[b, j] - masked[b, j]) for j in range(start, end)) / (end - start)
        assert float(value[b, t]) == pytest.approx(expected, abs=1e-5)


def test_expectation_is_the_kl_of_visible_from_masked():
    """Eq. 7: under the visible policy, the mean of `m * EALR` is KL(visible || masked)."""
    rng = np.random.default_rng(0)
    vocab, steps = 3, 3
    tables = rng.normal(size=(2, steps, vocab, vocab))  # logits given the previous token
    logp = tables - np.log(np.exp(tables).sum(-1, keepdims=True))
    actions = np.array(list(itertools.product(range(vocab), repeat=steps)))
    previous = np.concatenate([np.zeros((len(actions), 1), int), actions[:, :-1]], 1)
    token_logp = logp[:, np.arange(steps), previous, actions]  # [2, A, steps]
    batch = trajectories([[(1, 2), (steps, 0)]] * len(actions), turns=2, length=12)
    start = int(batch.action_span[0, 1, 0])
    visible, masked = np.zeros((2, len(actions), 12), np.float32)
    visible[:, start : start + steps], masked[:, start : start + steps] = token_logp
    value, _ = evidence.ealr(visible, masked, batch)
    weight = np.exp(token_logp[0].sum(-1))
    kl = (weight * (token_logp[0] - token_logp[1]).sum(-1)).sum()
    # The same KL by the chain rule, one state distribution at a time.
    chain, state = 0.0, np.eye(vocab)[0]
    for step in range(steps):
        p = np.exp(logp[0, step])
        chain += (state * (p * (logp[0, step] - logp[1, step])).sum(-1)).sum()
        state = state @ p
    assert kl == pytest.approx(chain, rel=1e-6)
    assert (weight * np.asarray(value)[:, 1]).sum() * steps == pytest.approx(chain, rel=1e-5)


def test_ealr_does_not_see_other_tokens():
    """Gradients of a turn's value reach the tokens of its own action and nothing else."""
    batch = trajectories([[(2, 2), (3, 2), (2, 0)]], turns=3)
    length = batch.tokens.shape[1]
    grads = jax.jacobian(lambda x: evidence.ealr(x, jnp.zeros((1, length)), batch)[0][0])(jnp.zeros((1, length)))
    for t in (1, 2):
        expected = np.zeros(length)
        start, end = batch.action_span[0, t]
        expected[start:end] = 1 / (end - start)
        np.testing.assert_allclose(grads[t, 0], expected, rtol=1e-6)
    assert not np.any(grads[0])


VALUE = np.array([[0.0, 0.5, 3.0], [0.0, -2.0, 0.0]], np.float32)
VALID = np.array([[False, True, True], [False, True, False]])
ANSWER = np.array([[False, False, True], [False, True, False]])
GROUP = np.zeros(2, np.int32)


def shaped(malformed=(False, False), **options):
    return evidence.turn_values(VALUE, VALID, np.array(malformed), ANSWER, GROUP, EvidenceConfig(**options))


def test_default_keeps_values_at_the_action():
    value, valid = shaped()
    np.testing.assert_array_equal(value, VALUE)
    np.testing.assert_array_equal(valid, VALID)


def test_credit_search_moves_values_to_the_search():
    value, valid = shaped(ealr_credit="search")
    np.testing.assert_array_equal(value, [[0.5, 3.0, 0.0], [-2.0, 0.0, 0.0]])
    np.testing.assert_array_equal(valid, [[True, True, False], [True, False, False]])


def test_search_only_drops_the_answer_transition_before_credit_moves():
    value, valid = shaped(ealr_actions="search_only", ealr_credit="search")
    np.testing.assert_array_equal(value, [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(valid, [[True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("mode", "value", "valid"),
    [
        ("zero", [0.0, 0.0, 0.0], [False, True, True]),
        ("drop", [0.0, 0.0, 0.0], [False, False, False]),
        ("off", [0.0, 0.5, 3.0], [False, True, True]),
    ],
)
def test_gate(mode, value, valid):
    got_value, got_valid = shaped(malformed=(True, False), ealr_gate=mode)
    np.testing.assert_array_equal(got_value[0], value)
    np.testing.assert_array_equal(got_valid[0], valid)
    np.testing.assert_array_equal(got_value[1], VALUE[1])


def test_clip():
    value, _ = shaped(ealr_clip=1.0)
    np.testing.assert_array_equal(value, [[0.0, 0.5, 1.0], [0.0, -1.0, 0.0]])


def test_bad_options_are_refused():
    for options in ({"ealr_credit": "both"}, {"ealr_actions": "x"}, {"ealr_gate": "x"}, {"ealr_clip": 0.0}):
        with pytest.raises(UserError, match=next(iter(options))):
            EvidenceConfig(**options)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_shuffle_permutes_within_group_and_turn_only(seed):
    rng = np.random.default_rng(seed)
    value = rng.permutation(24).reshape(8, 3).astype(np.float32)
    valid, group = rng.random((8, 3)) < 0.7, rng.integers(0, 2, 8)
    before = value.copy()
    shuffled = evidence.shuffle_within_group_and_turn((seed, 1), value, valid, group)
    np.testing.assert_array_equal(value, before)
    np.testing.assert_array_equal(shuffled[~valid], value[~valid])
    for g, t in itertools.product((0, 1), range(3)):
        rows = (group == g) & valid[:, t]
        assert sorted(shuffled[rows, t]) == sorted(value[rows, t])
    again = evidence.shuffle_within_group_and_turn((seed, 1), value, valid, group)
    np.testing.assert_array_equal(shuffled, again)


def test_shuffle_cuts_the_link():
    value = np.arange(400, dtype=np.float32)[:, None]
    shuffled = evidence.shuffle_within_group_and_turn(0, value, np.ones((400, 1), bool), np.zeros(400))
    assert abs(np.corrcoef(value[:, 0], shuffled[:, 0])[0, 1]) < 0.2
