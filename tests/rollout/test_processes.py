"""Rollouts on several devices or processes are those of one device; each process answers its own shards' queries."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
from edge_world import edge_questions, edge_world
from plain import Plain, assert_same

from cipo_jax.protocols.base import ActionKind
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.types import Trajectories

KEY = 11
QUESTIONS, SAMPLES = 32, 2
PAIRS = [("qwen3", "search_r1"), ("qwen3_5_short", "qwen_tools")]


@functools.cache
def wanted(architecture: str, protocol: str):
    """The plain rollout, the bound of its narrow decisions, and one device's trajectories."""
    world = edge_world(architecture, protocol)
    plain = Plain(world.graph, world.params, world.config, world.environment)
    sampling = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))
    asked = edge_questions(QUESTIONS)
    one = jax.device_get(world.rollout()(world.params, asked, SAMPLES, jax.random.key(KEY), sampling)[0])
    rows = plain.sample(asked, jax.random.key(KEY), np.float32(1.0), SAMPLES)
    bound = 5 * plain.logit_difference(one)
    assert_same(one, rows, bound)
    return world, rows, bound, one


def test_eight_devices_two_of_them_tensor_peers():
    architecture, protocol = PAIRS[1]
    _, rows, bound, _ = wanted(architecture, protocol)
    world = edge_world(architecture, protocol, fsdp=4, tensor=2)
    sampling = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))
    trajectories, counters = world.rollout()(
        world.params, edge_questions(QUESTIONS), SAMPLES, jax.random.key(KEY), sampling
    )
    for shard in trajectories.tokens.addressable_shards:  # tensor peers hold equal copies
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(trajectories.tokens)[shard.index])
    assert_same(jax.device_get(trajectories), rows, bound)
    assert world.environment.take_counts()["host_calls"] == int(counters["ask_steps"]) * 4


PROGRAM = """
    import json, sys

    from cipo_jax.distributed import start

    def main():
        assert start.initialise()
        import jax
        import numpy as np
        from edge_world import EdgeRetriever, edge_questions, edge_world
        from cipo_jax.distributed.arrays import fetch
        from cipo_jax.rollout.sampling import Sampling

        architecture, protocol, fsdp, tensor, key, questions, samples, out = sys.argv[1:]
        world = edge_world(architecture, protocol, int(fsdp), int(tensor))
        heard = []

        class Listening(EdgeRetriever):
            def retrieve(self, queries, top_k):
                heard.extend(queries)
                return super().retrieve(queries, top_k)

        world.environment.retrievers = {"default": Listening()}
        sampling = Sampling(np.float32(1.0), np.int32(0), np.float32(1.0))
        rollout = world.rollout()
        for _ in range(2):
            heard.clear()
            world.environment.take_counts()
            asked = edge_questions(int(questions))
            device, counters = rollout(world.params, asked, int(samples), jax.random.key(int(key)), sampling)
            trajectories, counters = fetch((device, counters))
        found = {
            "queries": sorted(heard), "steps": int(counters["ask_steps"]), "counts": world.environment.take_counts(),
        }
        with open(f"{out}/{jax.process_index()}.json", "w") as file:
            json.dump(found, file)
        np.savez(f"{out}/{jax.process_index()}.npz", **{k: np.asarray(v) for k, v in vars(trajectories).items()})
        return 0

    start.leave_on_failure(main)
"""


def test_two_processes_of_two_devices(tmp_path, repository):
    architecture, protocol = PAIRS[0]
    fsdp, tensor = 2, 2
    world, rows, bound, _ = wanted(architecture, protocol)
    (tmp_path / "rollout_program.py").write_text(textwrap.dedent(PROGRAM))
    paths = [repository, tmp_path, repository / "tests" / "rollout", repository / "tests" / "protocols"]
    arguments = [architecture, protocol, fsdp, tensor, KEY, QUESTIONS, SAMPLES, tmp_path]
    done = subprocess.run(
        [repository / "launch" / "local.sh", "2", "--devices_per_process=2", "rollout_program", *map(str, arguments)],
        env={
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "NPROC": "4",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    for process in range(2):
        with np.load(tmp_path / f"{process}.npz") as file:
            trajectories = Trajectories(**file)
        narrow = assert_same(trajectories, rows, bound)
        assert len(narrow) == 0  # else the queries below may differ
        found = json.loads((tmp_path / f"{process}.json").read_text())
        half = QUESTIONS * SAMPLES // 2
        own = range(process * half, (process + 1) * half)
        assert found["queries"] == sorted(q for b in own for q in queries(world, trajectories, b))
        assert found["counts"]["queries"] == len(found["queries"]) > 10
        assert found["counts"]["host_calls"] == found["steps"] * fsdp / 2


def queries(world, trajectories, b: int) -> list[str]:
    """What row `b` asked the retriever for."""
    protocol, asked = world.environment.protocol, []
    for start, end in trajectories.action_span[b, : world.config.max_turns]:
        if end == world.config.total_tokens:
            break  # nothing fits behind it
        ids = trajectories.tokens[b, start:end][-world.config.query_tokens :]
        action = protocol.parse_action(protocol.tokenizer.decode(ids.tolist()))
        if action.kind is ActionKind.SEARCH:
            asked.append(action.query)
    return asked
