"""The metrics file survives kills and odd numbers; the compile counter counts what it should."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.training.metrics import CompileCounter, MetricsWriter, TensorBoardMirror, WandbMirror, read_metrics


def test_records_are_plain_json_and_not_finite_numbers_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(
            np.int64(3),
            {
                "loss": jnp.float32(0.5),
                "half": jnp.bfloat16(0.25),
                "gradient_norm": float("nan"),
                "em_by_rank": np.array([0.0, np.inf, 1.0]),
                "count": np.int32(7),
                "nested": {"a": [1, np.float64("-inf")]},
                "note": "naïve",
            },
        )
    (line,) = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {
        "step": 3,
        "loss": 0.5,
        "half": 0.25,
        "gradient_norm": None,
        "em_by_rank": [0.0, None, 1.0],
        "count": 7,
        "nested": {"a": [1, None]},
        "note": "naïve",
        "nonfinite": ["gradient_norm", "em_by_rank", "nested.a"],
    }


def test_every_line_is_on_disk_at_once_and_the_position_is_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write(step, {"x": step})
        assert writer.position == path.stat().st_size
        assert [record["x"] for record in read_metrics(path)] == list(range(step + 1))
    assert writer.sync() == writer.position


@settings(deadline=None, max_examples=30)
@given(written=st.integers(0, 6), saved=st.integers(0, 6), torn=st.text(alphabet='{"x:1é', max_size=9))
def test_a_resumed_log_has_no_repeated_and_no_lost_step(tmp_path_factory, written, saved, torn):
    saved = min(saved, written)
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    position = 0
    with MetricsWriter(path) as writer:
        for step in range(written):
            if step == saved:
                position = writer.position
            writer.write(step, {"x": step * 1.5})
        if saved == written:
            position = writer.position
    with open(path, "ab") as stream:  # a kill in the middle of a line
        stream.write(torn.encode())
    with MetricsWriter(path, position=position) as writer:
        for step in range(saved, 8):
            writer.write(step, {"x": step * 1.5})
    assert [record["step"] for record in read_metrics(path)] == list(range(8))


def test_reopening_without_a_position_drops_only_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    with MetricsWriter(path) as writer:
        writer.write(2, {})
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2]


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)
    with pytest.raises(UserError, match="has 21 bytes but its checkpoint recorded 99"):
        MetricsWriter(path, position=99)


class Remembering:
    def __init__(self):
        self.seen = []
        self.closed = False

    def write(self, step, record):
        self.seen.append((step, record))

    def close(self):
        self.closed = True


def test_mirrors_see_plain_values_and_are_closed(tmp_path):
    mirror = Remembering()
    asked = []
    with MetricsWriter(tmp_path / "m.jsonl", mirrors=[lambda run_dir: asked.append(run_dir) or mirror]) as writer:
        writer.write(1, {"loss": jnp.float32(2)})
    assert asked == [tmp_path] and mirror.seen == [(1, {"loss": 2.0})] and mirror.closed


def test_tensorboard_gets_numbers_only(tmp_path, monkeypatch):
    class SummaryWriter:  # the interface of the optional package that the mirror uses
        def __init__(self, directory):
            self.directory, self.scalars, self.closed = directory, [], False
            made.append(self)

        def add_scalar(self, name, value, step):
            self.scalars.append((name, value, step))

        def close(self):
            self.closed = True

    made = []
    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    with MetricsWriter(tmp_path / "m.jsonl", mirrors=[TensorBoardMirror]) as writer:
        writer.write(4, {"loss": 2.0, "phase": "rl", "gap": float("nan"), "skipped": True})
    assert made[0].directory == str(tmp_path / "tensorboard") and made[0].closed
    assert made[0].scalars == [("loss", 2.0, 4)]


@pytest.mark.parametrize(("mirror", "module"), [(TensorBoardMirror, "tensorboardX"), (WandbMirror, "wandb")])
def test_an_absent_optional_package_is_told_with_its_extra(mirror, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module}; pip install 'cipo_jax\["):
        mirror(tmp_path)


def test_compilations_are_counted_once_per_program_and_shape():
    double = jax.jit(lambda x: x * 2 + 1)
    inputs = {n: jax.device_put(np.ones(n, np.float32)) for n in (3, 4)}
    with CompileCounter() as counter:
        double(inputs[3]).block_until_ready()
        assert counter.count == 1
        counter.mark()
        double(inputs[3]).block_until_ready()
        assert counter.since_mark == 0
        double(inputs[4]).block_until_ready()
        assert counter.since_mark == 1 and counter.count == 2
        assert len(counter.names_since_mark) == 1 and "lambda" in counter.names_since_mark[0]
    double(jax.device_put(np.ones(5, np.float32))).block_until_ready()
    assert counter.count == 2  # closed


def test_programs_compiled_ahead_and_in_other_threads_count():
    from concurrent.futures import ThreadPoolExecutor

    with CompileCounter() as counter, ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: jax.jit(lambda x: x - 3).lower(jax.ShapeDtypeStruct((7,), np.float32)).compile())
        compiled.result()
        assert counter.count == 1
