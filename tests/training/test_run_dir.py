"""What a run directory accepts and refuses, and that refusing changes nothing."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cipo_jax.errors import UserError
from cipo_jax.training import run_dir as run_dirs
from cipo_jax.training.run_dir import open_run_dir, write_atomic

TEXT = "seed = 1\n\n# Parameters for adamw:\nadamw.learning_rate = 0.001\nadamw.weights = \\\n    [1,\n     2]\n"


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_new_directory_is_created_and_a_second_start_continues_it(tmp_path):
    path = tmp_path / "deep" / "run"
    with open_run_dir(path, TEXT) as run:
        assert not run.resumed and run.path == path and run.writes
        assert (path / "config.gin").read_text() == TEXT
    with open_run_dir(path, TEXT) as run:
        assert run.resumed


def test_an_empty_directory_and_foreign_files_are_accepted(tmp_path):
    (tmp_path / "log.txt").write_text("started")
    with open_run_dir(tmp_path, TEXT) as run:
        assert not run.resumed


def test_another_experiment_is_refused_naming_what_differs(tmp_path):
    open_run_dir(tmp_path, TEXT).close()
    before = snapshot(tmp_path)
    other = TEXT.replace("0.001", "0.01").replace("     2]", "     3]").replace("seed = 1\n", "")
    with pytest.raises(UserError) as caught:
        open_run_dir(tmp_path, other)
    message = str(caught.value)
    assert "adamw.learning_rate is 0.001 there and 0.01 here" in message
    assert "seed is 1 there and not set here" in message
    assert "adamw.weights is [1, 2] there and [1, 3] here" in message
    assert snapshot(tmp_path) == before


def test_bindings_that_may_change(tmp_path):
    open_run_dir(tmp_path, TEXT).close()
    other = TEXT.replace("0.001", "0.01")
    with open_run_dir(tmp_path, other, may_change=["adamw.*"]) as run:
        assert run.resumed
    assert (tmp_path / "config.gin").read_text() == other
    with pytest.raises(UserError, match=r"learning_rate is 0\.01 there"):
        open_run_dir(tmp_path, TEXT, may_change=["seed"])


@pytest.mark.parametrize("name", run_dirs.OUTPUTS)
def test_results_without_a_configuration_are_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"holds {name} but no config.gin"):
        open_run_dir(tmp_path, TEXT)
    assert snapshot(tmp_path) == {name: b"{}"}


def test_no_permission_and_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a directory"):
        open_run_dir(tmp_path / "file", TEXT)
    with pytest.raises(UserError, match=r"cannot be written .*Not a directory"):
        open_run_dir(tmp_path / "file" / "below", TEXT)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    code = f"""
        import os
        from cipo_jax.errors import UserError
        from cipo_jax.training.run_dir import open_run_dir
        if os.geteuid() == 0:
            os.seteuid(65534)  # the superuser may write anywhere
        for path in ({str(closed)!r}, {str(closed / "run")!r}):
            try:
                open_run_dir(path, "a = 1")
            except UserError as error:
                print(error)
    """
    for folder in [tmp_path, *tmp_path.parents][:3]:  # readable, so that only writing is denied
        folder.chmod(folder.stat().st_mode | 0o055)
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), capture_output=True, text=True
    )
    lines = told.stdout.splitlines()
    assert len(lines) == 2, told.stderr
    assert all("cannot be written (Permission denied)" in line for line in lines)
    assert list(closed.iterdir()) == []


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(run_dirs.__file__).parents[2])}


def test_one_writer_at_a_time_and_no_stale_lock_after_sigkill(tmp_path):
    code = f"""
        import time
        from cipo_jax.training.run_dir import open_run_dir
        run = open_run_dir({str(tmp_path)!r}, "a = 1")
        print("open", flush=True)
        time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(UserError, match=f"being written by another process .pid {holder.pid} on"):
        open_run_dir(tmp_path, "a = 1")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with open_run_dir(tmp_path, "a = 1") as run:
        assert run.resumed
        with pytest.raises(UserError, match="another process"):
            open_run_dir(tmp_path, "a = 1")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    write_atomic(target, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dirs.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert snapshot(tmp_path) == {"summary.json": b"old"}


def test_the_operative_configuration_is_saved(tmp_path, clean_gin):
    @clean_gin.configurable
    def toy_run_dir_part(size=3):
        return size

    with open_run_dir(tmp_path, "a = 1") as run:
        toy_run_dir_part()
        assert "toy_run_dir_part.size = 3" in run.save_operative_config().read_text()
