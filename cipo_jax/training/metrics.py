"""Metrics of a run: one JSON object per line, mirrors for dashboards, and the count of compilations."""

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gin
import jax
import numpy as np

from cipo_jax import compat
from cipo_jax.errors import UserError


class Mirror(Protocol):
    """Something that is shown every record too."""

    def write(self, step: int, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@gin.configurable(allowlist=["mirrors"])
class MetricsWriter:
    """Appends records to a JSON-lines file whose length is known, so that a resumed run can cut it back.

    Every line is a valid JSON object with `step`; a value that is not finite is written as null and named in the
    record's `nonfinite` list. Only process 0 writes.

    Args:
      path: The file; created when absent.
      position: Bytes to keep of an existing file (what `position` was at the checkpoint). None keeps all whole lines.
      mirrors: Makers of further receivers of every record, each called with the directory of `path`; in gin
        `MetricsWriter.mirrors = [@TensorBoardMirror]`.

    Raises:
      UserError: The file is shorter than `position`.
    """

    def __init__(
        self, path: str | os.PathLike, *, position: int | None = None, mirrors: Sequence[Callable[[Path], Mirror]] = ()
    ):
        self.path = Path(path)
        self._mirrors: list[Mirror] = []
        self._stream = None
        self.position = position or 0
        if jax.process_index() != 0:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        keep = _whole_lines(self.path) if position is None else position
        if keep > size:
            raise UserError(
                f"{self.path} has {size} bytes but its checkpoint recorded {keep}; restore the file or start a new run."
            )
        self._stream = open(self.path, "ab")  # noqa: SIM115 (lives as long as the writer)
        self._stream.truncate(keep)
        self.position = keep
        self._mirrors = [make(self.path.parent) for make in mirrors]

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Writes one line and flushes it.

        Args:
          step: The update step that the record belongs to.
          record: Names and values: numbers, 0-d arrays, text, and lists or dicts of them. Arrays are fetched from the
            device here.
        """
        if self._stream is None:
            return
        bad: list[str] = []
        values = {name: _plain(value, name, bad) for name, value in record.items()}
        line = {"step": int(step), **values, **({"nonfinite": bad} if bad else {})}
        self._stream.write(json.dumps(line, allow_nan=False, ensure_ascii=False).encode("utf-8") + b"\n")
        self._stream.flush()
        self.position = self._stream.tell()
        for mirror in self._mirrors:
            mirror.write(int(step), values)

    def sync(self) -> int:
        """Forces the lines to disk and returns `position`: what a checkpoint records."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
        return self.position

    def close(self) -> None:
        if self._stream is not None:
            self.sync()
            self._stream.close()
            self._stream = None
        for mirror in self._mirrors:
            mirror.close()
        self._mirrors = []

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a metrics file in order; a last line cut short by a kill is left out."""
    records = []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith("\n"):
                break
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not a JSON object ({error.msg}); remove that line.") from error
    return records


@gin.configurable
class TensorBoardMirror:
    """Shows numbers in TensorBoard. Needs `pip install 'cipo_jax[tensorboard]'`.

    Args:
      run_dir: The run's directory.
      directory: Where event files go; `tensorboard` in the run's directory when None.
    """

    def __init__(self, run_dir: Path, directory: str | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                "TensorBoardMirror needs tensorboardX; pip install 'cipo_jax[tensorboard]' or drop the mirror."
            ) from error
        self._writer = SummaryWriter(directory or str(Path(run_dir) / "tensorboard"))

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@gin.configurable
class WandbMirror:
    """Shows records in Weights & Biases. Needs `pip install 'cipo_jax[wandb]'` and a login.

    Args:
      run_dir: The run's directory; its name is the run's name unless `name` is given.
      project: Project to log to.
      name: Name of the run.
    """

    def __init__(self, run_dir: Path, project: str = "cipo_jax", name: str | None = None):
        try:
            import wandb
        except ImportError as error:
            raise UserError("WandbMirror needs wandb; pip install 'cipo_jax[wandb]' or drop the mirror.") from error
        self._run = wandb.init(project=project, name=name or Path(run_dir).name, dir=str(run_dir))

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


class CompileCounter:
    """Counts XLA compilations of this process while it is open; loads from the persistent cache count too.

    `mark()` ends the warm-up; `since_mark` is the metric `compiles_after_warmup`.

    Attributes:
      count: Compilations since it was opened.
      names: What was compiled, in order, as JAX names it (empty text where JAX does not say).
    """

    def __init__(self):
        self.names: list[str] = []
        self._marked = 0
        self._mutex = threading.Lock()
        compat.add_duration_listener(self._heard)

    def _heard(self, event: str, seconds: float, **metadata: Any) -> None:
        if event == compat.COMPILE_EVENT:
            with self._mutex:
                self.names.append(str(metadata.get("fun_name", "")))

    @property
    def count(self) -> int:
        return len(self.names)

    def mark(self) -> None:
        """From now on nothing should compile."""
        self._marked = self.count

    @property
    def since_mark(self) -> int:
        return self.count - self._marked

    @property
    def names_since_mark(self) -> list[str]:
        return self.names[self._marked :]

    def close(self) -> None:
        compat.remove_duration_listener(self._heard)

    def __enter__(self) -> "CompileCounter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _plain(value: Any, name: str, bad: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", bad) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, bad) for item in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _plain(np.asarray(jax.device_get(value)).astype(_json_dtype(value.dtype)).tolist(), name, bad)
    if isinstance(value, float) and not math.isfinite(value):
        if name not in bad:
            bad.append(name)
        return None
    return value


def _json_dtype(dtype: Any) -> Any:
    """bfloat16 and the float8s have no JSON form of their own."""
    return np.float64 if jax.dtypes.issubdtype(dtype, np.floating) else dtype


def _whole_lines(path: Path) -> int:
    """Bytes up to and including the last line end."""
    if not path.exists():
        return 0
    return path.read_bytes().rfind(b"\n") + 1
