"""Advantages: hand-computed normalisations and returns, and a slow reference over random batches."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.learning import advantages
from cipo_jax.learning.advantages import AdvantageConfig
from cipo_jax.types import Role, Trajectories, TurnRewards


def rewards(outcome, value=None, valid=None, turns=3):
    outcome = np.asarray(outcome, np.float32)
    shape = (len(outcome), turns)
    value = np.zeros(shape, np.float32) if value is None else np.asarray(value, np.float32)
    valid = np.zeros(shape, bool) if valid is None else np.asarray(valid, bool)
    return TurnRewards(outcome=outcome, value=value, valid=valid)


def trajectories(role, turn):
    role = np.asarray(role, np.int8)
    count, length = role.shape
    span = np.zeros((count, 3, 2), np.int32)
    return Trajectories(
        tokens=np.zeros((count, length), np.int32),
        role=role,
        turn=np.asarray(turn, np.int8),
        behaviour_logprob=np.zeros((count, length), np.float32),
        length=(role != Role.PAD).sum(1).astype(np.int32),
        group=np.zeros(count, np.int32),
        stop_reason=np.ones(count, np.int32),
        action_span=span,
        evidence_span=span,
        content_span=span,
        passage_span=span[:, :, None],
        passage_row=np.full((count, 3, 1), -1, np.int32),
    )


def test_outcome_reaches_every_turn_up_to_the_last():
    config = AdvantageConfig(std_normalise=False, gamma=0.5)
    got = advantages.turn_advantages(rewards([1.0, 0.0]), np.zeros(2), np.array([2, 0]), config)
    np.testing.assert_allclose(got, [[0.125, 0.25, 0.5], [-0.5, 0.0, 0.0]])
    assert got.dtype == np.float32


def test_golden_group_turn():
    """Two rows, two turn indices; the second is valid in one row only, so it gives 0."""
    value, valid = [[0.0, 1.0, 5.0], [0.0, 3.0, 0.0]], [[False, True, True], [False, True, False]]
    config = AdvantageConfig(outcome_weight=0.0)
    got = advantages.turn_advantages(rewards([1.0, 0.0], value, valid), np.zeros(2), np.array([2, 1]), config)
    z = 1 / 1.1  # mean 2, std 1, floor .1
    np.testing.assert_allclose(got, [[-z, -z, 0.0], [z, z, 0.0]], rtol=1e-6)


def test_golden_group_pools_turns():
    value, valid = [[0.0, 1.0, 4.0], [0.0, 4.0, 0.0]], [[False, True, True], [False, True, False]]
    config = AdvantageConfig(outcome_weight=0.0, ealr_norm="group", gamma=0.5)
    got = advantages.turn_advantages(rewards([1.0, 0.0], value, valid), np.zeros(2), np.array([2, 1]), config)
    s = np.sqrt(2) + 0.1  # mean 3, deviations -2, 1, 1
    r = np.array([[0.0, -2 / s, 1 / s], [0.0, 1 / s, 0.0]])
    expected = [[0.5 * (r[0, 1] + 0.5 * r[0, 2]), r[0, 1] + 0.5 * r[0, 2], r[0, 2]], [0.5 * r[1, 1], r[1, 1], 0.0]]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_golden_joint():
    """IGPO: turn rewards 0 and 2 and outcomes 1 and 1 share mean 1 and std sqrt(1/2)."""
    value, valid = [[0.0, 0, 0], [2.0, 0, 0]], [[True, False, False], [True, False, False]]
    config = AdvantageConfig(ealr_norm="joint")
    got = advantages.turn_advantages(rewards([1.0, 1.0], value, valid), np.zeros(2), np.array([1, 1]), config)
    z = 1 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(got, [[-z, 0, 0], [z, 0, 0]], rtol=1e-6)


def test_outcome_and_turn_rewards_are_normalised_apart_then_weighted():
    value, valid = [[0.0, 1.0, 0], [0.0, 3.0, 0]], [[False, True, False]] * 2
    config = AdvantageConfig(outcome_weight=2.0, ealr_weight=0.5)
    got = advantages.turn_advantages(rewards([1.0, 0.0], value, valid), np.zeros(2), np.array([1, 1]), config)
    total = 2 * 0.5 / (0.5 + 1e-6) - 0.5 / 1.1
    np.testing.assert_allclose(got, [[total, total, 0], [-total, -total, 0]], rtol=1e-5)


def test_float_residue_with_leave_one_out():
    config = AdvantageConfig(leave_one_out=True)
    got = advantages.turn_advantages(
        rewards(np.array([0.35] * 7 + [1.0], np.float32), turns=1), np.zeros(8), np.zeros(8, int), config
    )
    assert np.abs(got).max() < 3.1


def test_equal_outcomes_give_zero_and_turn_rewards_still_teach():
    group, last = np.array([0, 0, 1, 1]), np.ones(4, int)
    value, valid = [[0, 1.0, 0], [0, 3.0, 0], [0, 0, 0], [0, 0, 0]], [[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    got = advantages.turn_advantages(rewards([0.35] * 4, value, valid), group, last, AdvantageConfig())
    assert got[:2, :2].all() and not got[2:].any()
    statistics = advantages.group_statistics(np.full(4, 0.35, np.float32), got, group)
    assert statistics == {
        "groups": 2.0,
        "zero_variance_groups": 2.0,
        "zero_variance_share": 1.0,
        "skipped_groups": 1.0,
        "group_reward_variance": pytest.approx(0.0, abs=1e-12),
    }
    np.testing.assert_array_equal(advantages.zero_advantage_rows(got, group), [False, False, True, True])


def test_group_reward_variance_golden():
    statistics = advantages.group_statistics([1.0, 0.0, 0.5, 0.5], np.ones((4, 1)), [0, 0, 1, 1])
    assert statistics["group_reward_variance"] == pytest.approx(0.125)
    assert statistics["zero_variance_groups"] == 1.0 and statistics["skipped_groups"] == 0.0


def test_nan_reward_spoils_its_own_group_only():
    got = advantages.turn_advantages(
        rewards([np.nan, 1.0, 1.0, 0.0]), np.array([0, 0, 1, 1]), np.zeros(4, int), AdvantageConfig()
    )
    assert np.isnan(got[:2, 0]).all() and np.isfinite(got[2:]).all()


def test_row_without_an_action_gets_nothing():
    got = advantages.turn_advantages(rewards([1.0, 0.0]), np.zeros(2), np.array([-1, 0]), AdvantageConfig())
    assert not got[0].any() and got[1, 0] < 0


def test_token_advantages_and_last_turn():
    p, a, o, x = Role.PROMPT, Role.ACTION, Role.OBSERVATION, Role.PAD
    batch = trajectories(
        [[p, a, a, o, a, x], [p, a, o, o, x, x], [p, p, x, x, x, x]],
        [[-1, 0, 0, 0, 1, -1], [-1, 0, 0, 0, -1, -1], [-1] * 6],
    )
    np.testing.assert_array_equal(advantages.last_turn(batch), [1, 0, -1])
    turns = np.array([[1.0, 2.0, 3.0], [-1.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    np.testing.assert_array_equal(
        advantages.token_advantages(turns, batch), [[0, 1, 1, 0, 2, 0], [0, -1, 0, 0, 0, 0], [0] * 6]
    )


def test_bad_options_are_refused():
    for options in ({"ealr_norm": "turn"}, {"gamma": 1.5}, {"ealr_std_floor": 0.0}):
        with pytest.raises(UserError, match=next(iter(options))):
            AdvantageConfig(**options)


def slow_reference(data, group, last, config):
    """Turn by turn with Python floats, straight from the equations."""

    def normalise(pool, floor):
        mean = sum(pool) / len(pool)
        std = (sum((x - mean) ** 2 for x in pool) / len(pool)) ** 0.5
        return [(x - mean) / (std + floor) for x in pool]

    count, turns = data.value.shape
    reward = np.zeros((count, turns))
    for g in set(group.tolist()):
        rows = [b for b in range(count) if group[b] == g]
        cells = [[(b, t) for b in rows if data.valid[b, t]] for t in range(turns)]
        if config.ealr_norm == "group":
            cells = [[cell for pool in cells for cell in pool]]
        for pool in cells:
            if len(pool) >= 2:
                z = normalise([float(data.value[c]) for c in pool], config.ealr_std_floor)
                for cell, x in zip(pool, z):
                    reward[cell] += config.ealr_weight * x
        outcomes = [float(data.outcome[b]) for b in rows]
        if len(rows) == 1:
            z = [outcomes[0] / (1 + config.outcome_std_floor)]
        else:
            z = normalise(outcomes, config.outcome_std_floor)
        for b, x in zip(rows, z):
            reward[b, last[b]] += config.outcome_weight * x
    expected = np.zeros((count, turns))
    for b in range(count):
        for k in range(turns):
            expected[b, k] = sum(config.gamma ** (t - k) * reward[b, t] for t in range(k, turns))
    return expected


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["group_turn", "group"]),
    st.sampled_from([1.0, 0.9, 0.0]),
    st.sampled_from([0.0, 1.0, 2.0]),
)
def test_against_the_slow_reference(seed, ealr_norm, gamma, ealr_weight):
    rng = np.random.default_rng(seed)
    count, turns = 9, 4
    group, last = rng.integers(0, 3, count), rng.integers(0, turns, count)
    valid = (rng.random((count, turns)) < 0.6) & (np.arange(turns) <= last[:, None])
    data = rewards(rng.choice([0.0, 0.35, 1.0], count), np.where(valid, rng.normal(size=valid.shape), 0), valid)
    config = dataclasses.replace(AdvantageConfig(), ealr_norm=ealr_norm, gamma=gamma, ealr_weight=ealr_weight)
    got = advantages.turn_advantages(data, group, last, config)
    np.testing.assert_allclose(got, slow_reference(data, group, last, config), atol=2e-5)
