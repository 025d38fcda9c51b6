"""The rollout benchmark's job, and our side of it on a tiny decoder."""

import numpy as np
import pytest

from cipo_jax.benchmarks.rollout import Ours, automaton_seconds, machine
from cipo_jax.benchmarks.rollout_job import Job, whole

TINY = dict(shape="tiny", rollouts=8, slots=4, group=2, prompt=16, observation=16, action=8.0, keys=32)


def test_lengths_are_log_normal_and_every_part_stands_for_the_whole():
    job = Job()
    assert job.lengths.shape == (128, 4)
    assert abs(job.lengths.mean() - job.action) < 0.5
    assert abs(np.log(job.lengths).std() - job.sigma) < 0.05
    assert (np.sort(job.lengths.reshape(4, 32, 4), 1) == np.sort(job.lengths[:32], 0)).all()


def test_contexts_and_batches():
    job = Job(**TINY)
    assert (job.context(0) == 16).all()
    np.testing.assert_array_equal(job.context(2), 16 + 2 * 16 + job.lengths[:, 0] + job.lengths[:, 1])
    assert job.places == (job.context(3) + job.lengths[:, 3]).max()
    for batches in (job.batches(2), job.unsorted_batches()):
        assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    first, second = job.batches(2)
    assert job.context(2)[first].max() <= job.context(2)[second].min()


def test_the_whole_takes_as_long_as_its_steps():
    parts = [{"seconds": 2.0, "steps": 10}, {"seconds": 4.0, "steps": 20}]
    assert whole(parts, 90) == pytest.approx(18.0)


def test_our_side_has_the_forced_lengths_and_all_observations():
    job = Job(**TINY)
    ours = Ours(job)
    done = ours.search_job()  # checks the lengths itself
    assert done["tokens"] == job.lengths.sum()
    prompts, observed = 4 * 16, 8 * 3 * 16
    assert done["forwarded_tokens"] == prompts + observed + job.lengths.sum() - 8
    assert ours.decode_job()["decode_steps"] == 32 - 8
    assert ours.search._program._cache_size() == 1


def test_what_the_machine_and_the_automaton_take():
    assert 0 < automaton_seconds(Job(**TINY), 50) < 1e-2
    assert all(value > 0 for value in machine(0.0).values())
