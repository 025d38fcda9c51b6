"""Searches beside the rollout: its result depends neither on when they are answered nor on how badly."""

import faulthandler
import threading
import time

import jax
import numpy as np
import pytest
from tiny_world import Echo, assert_same_trajectories, questions

from cipo_jax.rollout.sampling import Sampling

KEY = jax.random.key(7)
SAMPLES = 3
SAMPLING = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))


@pytest.fixture
def limit():
    """A test that takes longer than five minutes ends the process: a hanging device program cannot be interrupted."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Slow(Echo):
    """Takes its time, by a random amount."""

    def __init__(self, seconds, seed=0):
        self.seconds, self._rng, self._lock = seconds, np.random.default_rng(seed), threading.Lock()

    def retrieve(self, queries, top_k):
        with self._lock:
            share = self._rng.random()
        time.sleep(self.seconds * share)
        return super().retrieve(queries, top_k)


class Bad(Echo):
    """Fails in a way of one's choice; `dies` works for two calls before."""

    def __init__(self, how):
        self.how, self.calls, self.gone = how, 0, threading.Event()

    def retrieve(self, queries, top_k):
        self.calls += 1
        match self.how:
            case "raises":
                raise ConnectionError("gone")
            case "exits":
                raise SystemExit
            case "sleeps":
                self.gone.wait()  # for ever, or until the test is over
            case "dies" if self.calls > 2:
                raise ConnectionResetError("died")
            case "dies":
                return super().retrieve(queries, top_k)
        return {"short": [], "nonsense": [[None, 3]] * len(queries), "none": None, "number": 7}.get(self.how)


def run(setting, rollout):
    trajectories, counters = jax.device_get(rollout(setting.params, questions(8), SAMPLES, KEY, SAMPLING))
    return trajectories, counters, setting.environment.take_counts()


@pytest.fixture(scope="module")
def blocking(setting):
    one = setting()
    return run(one, one.rollout())[0]


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("fsdp", [1, 4])
def test_lag_gives_the_same_bits_whatever_the_latency(setting, blocking, fsdp):
    many = setting(fsdp)
    rollout = many.rollout(slots=8, extend_slots=1, reads=2, retrieval="lag", retrieval_lag=4)
    seen = []
    for seconds, seed in ((0.0, 0), (0.05, 1), (0.05, 2)):
        many.environment.retrievers = {"default": Slow(seconds, seed)}
        seen.append(run(many, rollout))
    for trajectories, counters, counts in seen:
        for a, b in zip(jax.tree.leaves(trajectories), jax.tree.leaves(seen[0][0])):
            np.testing.assert_array_equal(a, b)
        assert {n: int(x) for n, x in counters.items()} == {n: int(x) for n, x in seen[0][1].items()}
        assert counts["retrieval_timeouts"] == counts["retrieval_errors"] == 0 < counts["queries"]
    assert all(counts["retrieval_wait_seconds"] > 0 for _, _, counts in seen[1:])
    assert_same_trajectories(seen[0][0], blocking)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("fsdp", [1, 4])
@pytest.mark.parametrize("mode", ["blocking", "lag", "ready"])
def test_bad_retrievers_become_observations_and_counts(setting, mode, fsdp):
    many = setting(fsdp)
    many.environment = type(many.environment)(
        many.environment.protocol, many.environment.retrievers, 2, 40, timeout_s=0.3, workers=2
    )
    rollout = many.rollout(slots=8, extend_slots=1, retrieval=mode, retrieval_lag=2)
    want = None
    for how in ("raises", "exits", "short", "nonsense", "none", "number", "dies", "sleeps"):
        bad = Bad(how)
        many.environment.retrievers = {"default": bad}
        trajectories, counters, counts = run(many, rollout)
        bad.gone.set()
        assert (trajectories.stop_reason > 0).all(), how
        assert counts["queries"] > 0 and counts["host_calls"] == counters["ask_steps"] * fsdp, how
        assert (counts["retrieval_timeouts"] > 0) == (how == "sleeps"), how
        if how == "dies":
            assert 0 < counts["retrieval_errors"] < counts["queries"] and trajectories.searches.sum() > 0
            continue
        assert counts["retrieval_errors"] == counts["queries"] and trajectories.searches.sum() == 0, how
        want = trajectories if want is None else want
        assert_same_trajectories(trajectories, want)  # a failure is a failure


@pytest.mark.usefixtures("limit")
def test_the_next_rollout_is_not_troubled_by_answers_that_came_too_late(setting, blocking):
    one = setting()
    one.environment = type(one.environment)(one.environment.protocol, {"default": Echo()}, 2, 40, timeout_s=0.2)
    rollout = one.rollout(slots=8, extend_slots=1, retrieval="ready")
    late = Bad("sleeps")
    one.environment.retrievers = {"default": late}
    assert run(one, rollout)[2]["retrieval_timeouts"] > 0
    one.environment.retrievers = {"default": Echo()}
    late.gone.set()
    trajectories, _, counts = run(one, rollout)
    assert counts["retrieval_errors"] == 0
    assert_same_trajectories(trajectories, blocking)
