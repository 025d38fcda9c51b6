"""Slots that are refilled give the trajectories of a slot per row, on any number of devices, by the same program."""

import re

import jax
import numpy as np
import pytest
from tiny_world import CONFIG, assert_same_trajectories, questions

from cipo_jax.errors import UserError
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.types import Role, StopReason

KEY = jax.random.key(7)
SAMPLES = 3
SAMPLING = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))


def run(setting, rollout, asked, **more):
    """Host arrays of the trajectories, and the counters."""
    return jax.device_get(rollout(setting.params, asked, SAMPLES, KEY, SAMPLING, **more))


@pytest.fixture(scope="module")
def whole(setting):
    """Everything with a slot per row."""
    one = setting()
    return run(one, one.rollout(), questions(8))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 4},
        {"slots": 8, "extend_slots": 2, "retrieval": "ready"},
        {"slots": 5, "extend_slots": 1, "reads": 3, "retrieval": "lag", "retrieval_lag": 3},
        {"slots": 1000, "extend_slots": 5, "reads": 2, "retrieval": "ready", "poll_steps": 4},
    ],
    ids=str,
)
def test_slots_do_not_change_trajectories(setting, whole, change):
    one = setting()
    got, counters = run(one, one.rollout(**change), questions(8))
    assert_same_trajectories(got, whole[0])
    rows, slots = 8 * SAMPLES, min(change["slots"], 8 * SAMPLES)
    assert counters["refills"] == rows - slots
    for name in ("prompt_tokens", "forwarded_tokens"):
        assert counters[name] == whole[1][name], name
    assert counters["forwarded_tokens"] > rows
    sampled = (got.role == Role.ACTION).sum()
    lanes = slots * counters["decode_steps"]
    np.testing.assert_allclose(counters["slot_occupancy"], sampled / lanes, rtol=1e-6)
    # Lanes with tokens and lanes without make up all the steps: prefill of 8 questions, extend steps, decode steps.
    prefill = -(-max(len(one.environment.protocol.prompt_ids(q.question)) for q in questions(8)) // CONFIG.chunk)
    extend = CONFIG.chunk * min(change.get("extend_slots", slots), slots) * (counters["extend_steps"] - prefill)
    assert counters["padded_tokens"] + counters["forwarded_tokens"] == lanes + extend + prefill * CONFIG.chunk * 8
    if change["slots"] < 6:
        assert counters["slot_occupancy"] > whole[1]["slot_occupancy"]


@pytest.mark.parametrize("fsdp,tensor,mode", [(4, 2, "lag"), (2, 1, "ready")])
def test_shards_refill_their_own_slots(setting, whole, fsdp, tensor, mode):
    many = setting(fsdp, tensor)
    rollout = many.rollout(slots=2 * fsdp, extend_slots=1, reads=2, retrieval=mode, retrieval_lag=2)
    device, counters = rollout(many.params, questions(8), SAMPLES, KEY, SAMPLING)
    for shard in device.tokens.addressable_shards:  # tensor peers hold equal copies
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(device.tokens)[shard.index])
    assert len({str(s.index) for s in device.tokens.addressable_shards}) == fsdp
    assert_same_trajectories(jax.device_get(device), whole[0])
    assert int(counters["forwarded_tokens"]) == whole[1]["forwarded_tokens"]
    assert many.environment.take_counts()["host_calls"] == int(counters["ask_steps"]) * fsdp


def test_caches_stay_on_their_shards(setting):
    """Weights are gathered once, before the loops over tokens, in which nothing but integers moves."""
    many = setting(4, 1)
    rollout = many.rollout(slots=8, extend_slots=1)
    ids, counts = many.rules.put_batch((np.zeros((8, 12), np.int32), np.full(8, 3, np.int32)))
    text = rollout._program.lower(many.params, ids, counts, KEY, SAMPLING, samples=SAMPLES).compile().as_text()
    inside, once = (
        re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", part)
        for part in text.split("\nENTRY ")
    )
    places = re.compile(rf"f32\[(?:\d+,)*{CONFIG.total_tokens}(?:,\d+)*\]")
    assert places.search(text) and any("f32" in shapes for shapes in once)  # caches there are, and gathered weights
    assert inside and not [shapes for shapes in inside if "f32" in shapes]
    assert not [shapes for shapes in once if places.search(shapes)]


def test_action_limits_are_kept(setting):
    one = setting()
    limits = np.random.default_rng(0).integers(1, CONFIG.action_tokens, (24, CONFIG.max_turns + 1)).astype(np.int32)
    got, _ = run(one, one.rollout(slots=4), questions(8), action_limits=limits)
    sizes = got.action_span[..., 1] - got.action_span[..., 0]
    assert (sizes <= limits).all() and (sizes == limits).sum() > 10
    assert {StopReason.ANSWER, StopReason.TURN_LIMIT} <= set(got.stop_reason.tolist())


def test_nothing_compiles_after_the_first_call(setting):
    one = setting()
    rollout, asked = one.rollout(slots=4, retrieval="ready"), questions(4)
    protocol = one.environment.protocol
    ends = []
    for temperature, stops in [
        (1.0, ("</search>", "</answer>")),
        (0.3, ("</search>", "</answer>")),
        (1.0, ("<search>", "</answer>")),
    ]:
        protocol.stop_strings, protocol.terminal_stops = stops, stops[1:]
        sampling = Sampling(np.float32(temperature), np.int32(0), np.float32(1.0))
        got = jax.device_get(rollout(one.params, asked, SAMPLES, KEY, sampling, protocol)[0])
        ends.append(got.tokens)
    assert rollout._program._cache_size() == 1
    assert not np.array_equal(ends[0], ends[2])


def test_slots_that_do_not_divide_are_told(setting):
    many = setting(2)
    with pytest.raises(UserError, match=r"slots=5 does not divide over 2 data shards"):
        many.rollout(slots=5)(many.params, questions(4), 1, KEY, SAMPLING)
    with pytest.raises(UserError, match="retrieval='sometimes'"):
        many.rollout(retrieval="sometimes")
    with pytest.raises(UserError, match="reads=0"):
        many.rollout(reads=0)
