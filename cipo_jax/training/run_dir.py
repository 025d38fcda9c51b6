"""The directory of one run: its identity, its lock, and files that are never half-written."""

import fcntl
import fnmatch
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from cipo_jax import config
from cipo_jax.errors import UserError

CONFIG = "config.gin"
OPERATIVE = "operative_config.gin"
LOCK = ".lock"
OUTPUTS = ("metrics.jsonl", "checkpoints", "summary.json")  # what a run would overwrite


class RunDir:
    """An open run directory. One process writes it at a time; the lock goes when that process ends, however it ends.

    Attributes:
      path: The directory, absolute.
      resumed: Whether it already held this run.
      writes: Whether this process writes files (process 0 of a multi-host run).
    """

    def __init__(self, path: Path, resumed: bool, writes: bool, lock: int | None):
        self.path = path
        self.resumed = resumed
        self.writes = writes
        self._lock = lock

    def file(self, name: str) -> Path:
        """The path of `name` in the directory."""
        return self.path / name

    def write(self, name: str, content: str | bytes) -> Path:
        """Replaces the file `name` in one step (process 0 only) and returns its path."""
        path = self.file(name)
        if self.writes:
            write_atomic(path, content)
        return path

    def save_operative_config(self) -> Path:
        """Writes the parameters, defaults included, of every configurable that was called."""
        return self.write(OPERATIVE, config.operative_config())

    def close(self) -> None:
        """Lets go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_run_dir(path: str | os.PathLike, config_text: str | None = None, *, may_change: Sequence[str] = ()) -> RunDir:
    """Creates a run directory, or opens one that holds the same experiment.

    Args:
      path: The directory; parents are created.
      config_text: What identifies the experiment, as `cipo_jax.config.config_text` writes it (that when None). It is
        saved as `config.gin`.
      may_change: Patterns (`fnmatch`) of bindings that may differ from the saved ones, such as `Progress.*`; the new
        text then replaces the saved one.

    Returns:
      The locked directory. In a multi-host run only process 0 locks and writes.

    Raises:
      UserError: It holds another experiment or other files, another process is writing it, or it cannot be written.
        Nothing in it was changed then.
    """
    path = Path(path).absolute()
    text = config.config_text() if config_text is None else config_text
    writes = jax.process_index() == 0
    try:
        resumed = _holds_this_run(path, text, may_change)
        if not writes:
            return RunDir(path, resumed, False, None)
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        try:
            resumed = _holds_this_run(path, text, may_change)  # again: another process may have created it meanwhile
            if not resumed or (path / CONFIG).read_text(encoding="utf-8") != text:
                write_atomic(path / CONFIG, text)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise UserError(
            f"--run_dir {path} cannot be written ({error.strerror or error}); choose a directory you may write to."
        ) from error
    return RunDir(path, resumed, True, lock)


def write_atomic(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file under a temporary name, flushes it to disk and renames it: a reader sees the old or the new one."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _holds_this_run(path: Path, text: str, may_change: Sequence[str]) -> bool:
    """False for a new or empty directory, True for this experiment's; anything else is the user's error."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise UserError(f"--run_dir {path} is a file; name a directory.")
    saved = path / CONFIG
    if not saved.exists():
        for name in OUTPUTS:
            if (path / name).exists():
                raise UserError(
                    f"--run_dir {path} holds {name} but no {CONFIG}, so it is not known which run wrote it; choose a "
                    "new directory or remove it."
                )
        return False
    changed = {
        name: values
        for name, values in config.differences(saved.read_text(encoding="utf-8"), text).items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in may_change)
    }
    if changed:
        shown = [
            f"{name} is {old if old is not None else 'not set'} there and {new if new is not None else 'not set'} here"
            for name, (old, new) in list(changed.items())[:3]
        ]
        more = f" and {len(changed) - 3} more differ" if len(changed) > 3 else ""
        raise UserError(
            f"--run_dir {path} holds another experiment ({'; '.join(shown)}{more}); choose another directory, or the "
            "settings it was started with to continue it."
        )
    return True


def _take_lock(path: Path) -> int:
    """An flock on the directory's lock file. The kernel drops it with its process, so no stale lock can block."""
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 200).decode("utf-8", "replace").strip()
        os.close(handle)
        raise UserError(
            f"--run_dir {path} is being written by another process ({owner or 'unknown'}); wait for it or stop it."
        ) from None
    except BaseException:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return handle
