"""Checkpoints restore exactly, anywhere, and whatever moment the process was killed at."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cipo_jax.errors import UserError
from cipo_jax.training.checkpoints import Checkpoints, StopSignal, abstract_like
from cipo_jax.training.metrics import CompileCounter, MetricsWriter, read_metrics


class Moments(NamedTuple):
    mu: jax.Array
    nu: tuple


def make_state(mesh: jax.sharding.Mesh) -> dict:
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    return {
        "params": {"w": put(w, "fsdp", "tensor"), "b": put(jnp.arange(24, dtype=jnp.bfloat16), "fsdp")},
        "opt": (Moments(put(w * 2, None, "tensor"), (put(jnp.int32(5)),)), ()),
        "key": put(jax.random.split(jax.random.key(7), 4)),
        "rbg": jax.random.key(1, impl="rbg"),
        "scale": np.float32(0.1),
    }


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    return jax.sharding.Mesh(devices, ("fsdp", "tensor"))


def host(state) -> list[np.ndarray]:
    def is_key(x):
        return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)

    return [np.array(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def assert_same(a, b) -> None:
    for x, y in zip(host(a), host(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_round_trip_keeps_every_bit_the_structure_and_the_metadata(tmp_path):
    state = make_state(mesh_of(4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {"data_step": np.int64(12), "best": None, "names": ["a"], "loss": jnp.float32(0.5)})
        restored, meta = checkpoints.restore(abstract_like(state))
    assert meta == {"data_step": 12, "best": None, "names": ["a"], "loss": 0.5}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same(restored, state)
    assert restored["key"].dtype == state["key"].dtype and restored["rbg"].dtype == state["rbg"].dtype
    np.testing.assert_array_equal(jax.random.bits(restored["rbg"]), jax.random.bits(state["rbg"]))


def test_restore_on_another_mesh(tmp_path):
    state, other = make_state(mesh_of(4, 2)), make_state(mesh_of(2, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
    other = jax.tree.map(lambda x: x, other)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(abstract_like(other))
    assert_same(restored, state)
    w = restored["params"]["w"]
    assert w.sharding.mesh.shape == {"fsdp": 2, "tensor": 2} and w.sharding.spec == P("fsdp", "tensor")
    assert len(w.sharding.device_set) == 4 and w.addressable_shards[0].data.shape == (32, 16)


def test_a_part_can_be_restored_and_cast(tmp_path):
    state = make_state(mesh_of(4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {"x": 1})
        part = {"params": {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=state["params"]["w"].sharding)}}
        restored, meta = checkpoints.restore(part)
        assert meta == checkpoints.read_meta() == {"x": 1}
    np.testing.assert_array_equal(restored["params"]["w"], state["params"]["w"].astype(jnp.bfloat16))


def test_what_does_not_fit_is_named(tmp_path):
    state = make_state(mesh_of(4, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        with pytest.raises(
            UserError, match=r"'params\.w' has shape \(64, 32\) but the configuration asks for \(64, 31\)"
        ):
            checkpoints.restore({"params": {"w": jax.ShapeDtypeStruct((64, 31), jnp.float32)}})
        with pytest.raises(UserError, match=r"there is no array 'params\.v'"):
            checkpoints.restore({"params": {"v": jax.ShapeDtypeStruct((64, 32), jnp.float32)}})
        with pytest.raises(UserError, match="has no checkpoint 1; it holds steps 2"):
            checkpoints.restore(abstract_like(state), 1)
    with Checkpoints(tmp_path / "new") as empty, pytest.raises(UserError, match="has no checkpoint; it holds none"):
        empty.restore(abstract_like(state))
    with pytest.raises(UserError, match="There is no checkpoint directory"):
        Checkpoints(tmp_path / "absent", read_only=True)
    with pytest.raises(UserError, match="keep=0"):
        Checkpoints(tmp_path / "new", keep=0)


def test_the_newest_and_the_best_are_kept_across_restarts(tmp_path):
    scores = [0.1, 0.9, 0.3, 0.9, None, float("nan"), 0.2, 0.4]
    state = {"x": np.arange(3)}
    for first in (0, 4):
        with Checkpoints(tmp_path, keep=2, background=first == 0) as checkpoints:
            for step in range(first, first + 4):
                checkpoints.save(step, state, {"step": step}, score=scores[step])
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps == [3, 6, 7]
        assert checkpoints.best_step == 3 and checkpoints.best_score == 0.9 and checkpoints.latest_step == 7
        assert checkpoints.read_meta(checkpoints.best_step) == {"step": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "7"]


def test_saving_a_step_again_does_nothing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": np.arange(3)}, {"n": 1})
        checkpoints.save(1, {"x": np.arange(4)}, {"n": 2})
        assert checkpoints.read_meta(1) == {"n": 1}


def test_the_state_may_be_donated_while_files_are_written_and_nothing_compiles(tmp_path):
    sharding = NamedSharding(mesh_of(4, 2), P("fsdp"))
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = update(jax.device_put(np.zeros((1024, 1024), np.float32), sharding))
    with Checkpoints(tmp_path, keep=5) as checkpoints, CompileCounter() as counter:
        for step in range(3):
            checkpoints.save(step, {"x": x}, {})
            for _ in range(4):
                x = update(x)
            x.block_until_ready()
        assert counter.count == 0, counter.names
        for step in range(3):
            restored, _ = checkpoints.restore({"x": abstract_like(x)}, step)
            np.testing.assert_array_equal(restored["x"], np.full((1024, 1024), 1 + 4 * step, np.float32))


# A training loop in miniature: the state after `step` updates is `step` everywhere, one metrics line per update.
LOOP = """
    import sys, os
    import jax, jax.numpy as jnp, numpy as np
    from cipo_jax.training.checkpoints import Checkpoints, abstract_like
    from cipo_jax.training.metrics import MetricsWriter

    directory = sys.argv[1]
    state = {"w": jnp.zeros((1 << 20,)), "key": jax.random.key(0)}
    update = jax.jit(lambda s: {"w": s["w"] + 1, "key": jax.random.fold_in(s["key"], 1)}, donate_argnums=0)
    with Checkpoints(f"{directory}/checkpoints") as checkpoints:
        step, position = 0, 0
        if checkpoints.latest_step is not None:
            state, meta = checkpoints.restore(abstract_like(state))
            step, position = meta["step"], meta["position"]
        metrics = MetricsWriter(f"{directory}/metrics.jsonl", position=position)
        while True:
            state = update(state)
            step += 1
            metrics.write(step, {"w": state["w"][0]})
            checkpoints.save(step, state, {"step": step, "position": metrics.sync()})
            if step % 3 == 0:
                print(step, flush=True)
"""


def test_sigkill_at_any_instant_leaves_a_complete_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": "", "NPROC": "2"}
    torn, before, key = 0, 0, jax.random.key(0)
    for attempt in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LOOP), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline().strip().isdigit()
        if attempt % 3 == 2:
            time.sleep(0.03 * attempt)  # any instant
        else:
            while not list((tmp_path / "checkpoints").glob("*tmp*")):  # the middle of a write
                assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        torn += bool(list((tmp_path / "checkpoints").glob("*tmp*")))

        state = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32), "key": key}
        with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
            step = checkpoints.latest_step
            restored, meta = checkpoints.restore(state)
        assert meta["step"] == step >= max(before, 2)
        np.testing.assert_array_equal(restored["w"], np.full(1 << 20, step, np.float32))
        expected = key
        for _ in range(step):
            expected = jax.random.fold_in(expected, 1)
        np.testing.assert_array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(expected))
        before = step
        if torn >= 2 and attempt >= 2:
            break
    assert torn >= 2  # the kill did hit writes
    with MetricsWriter(tmp_path / "metrics.jsonl", position=meta["position"]):
        records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["w"]) for record in records] == [(n, n) for n in range(1, step + 1)]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:  # the next write clears what the kills left behind
        checkpoints.save(step + 1, restored, {})
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == sorted([str(step), str(step + 1)])


def test_sigterm_is_noticed_and_the_handler_restored():
    earlier = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.requested() and stop.requested()
    assert signal.getsignal(signal.SIGTERM) is earlier
