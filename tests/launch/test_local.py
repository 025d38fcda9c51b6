"""`launch/local.sh` starts connected processes, passes signals on and reports the worst exit code."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

# Adds one per update on a mesh over both processes until it is told to stop, then saves.
PROGRAM = """
    import os, time
    from pathlib import Path

    import jax, jax.numpy as jnp

    from cipo_jax.distributed import start
    from cipo_jax.training.checkpoints import Checkpoints, StopSignal

    def main():
        start.initialise()
        print(jax.process_index(), jax.process_count(), jax.local_device_count(), os.environ["NPROC"], flush=True)
        sharding = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.P("x"))
        x = jax.jit(lambda: jnp.arange(8.0), out_shardings=sharding)()
        update = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=0)
        with StopSignal() as stop, Checkpoints(Path(__file__).parent / "checkpoints") as checkpoints:
            step = 0
            while not stop.requested():
                x, total = update(x)
                assert float(total) == 28 + 8 * step, total  # the sum crosses the processes
                step += 1
                if step == 3:
                    print("running", flush=True)
                time.sleep(0.02)
            checkpoints.save(step, {"x": x}, {})
        print("saved", step, flush=True)
        return 0

    start.leave_on_failure(main)
"""


@pytest.fixture
def launch(tmp_path, repository):
    def launch(program: str, *arguments: str, **environment: str) -> subprocess.Popen:
        (tmp_path / "toy_program.py").write_text(textwrap.dedent(program))
        return subprocess.Popen(
            [repository / "launch" / "local.sh", *arguments],
            env={
                **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
                "PYTHON": sys.executable,
                "PYTHONPATH": f"{repository}{os.pathsep}{tmp_path}",
                "NPROC": "3",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return launch


def finish(process: subprocess.Popen) -> tuple[int, list[str]]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out.splitlines()


def test_two_processes_compute_together_and_stop_at_the_same_step_on_sigterm(launch, tmp_path):
    process = launch(PROGRAM, "2", "--devices_per_process=2", "toy_program")
    lines, running = [], set()
    while len(running) < 2:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
        if lines[-1].endswith("running\n"):
            running.add(lines[-1][:3])
    process.send_signal(signal.SIGTERM)
    code, rest = finish(process)
    assert code == 0, lines + rest
    threads = max(os.cpu_count(), 4)
    assert {f"[{n}] {n} 2 2 {threads}\n" for n in (0, 1)} <= set(lines)
    saved = {line[:3]: line.split()[-1] for line in rest if " saved " in line}
    assert set(saved) == {"[0]", "[1]"} and len(set(saved.values())) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [saved["[0]"]]


def test_a_failure_stops_the_others_and_gives_the_exit_code(launch):
    program = """
        import os, sys, time
        if os.environ["CIPO_PROCESS_ID"] == "1":
            print("failing", sys.argv[1:], file=sys.stderr, flush=True)
            sys.exit(3)
        time.sleep(60)
    """
    code, lines = finish(launch(program, "3", "toy_program", "--a b", "c", GRACE_S="1"))
    assert code == 3
    assert "[1] failing ['--a b', 'c']" in lines
    assert "A process failed with code 3; stopping the other 2." in lines


def test_an_interrupt_reaches_all(launch):
    program = """
        import os, time
        try:
            print("up", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise SystemExit(130)
    """
    process = launch(program, "2", "toy_program")
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] up\n", "[1] up\n"}
    process.send_signal(signal.SIGINT)
    code, lines = finish(process)
    assert code == 130 and sorted(lines) == ["[0] interrupted", "[1] interrupted"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "error: the number of processes is missing"),
        (["two", "m"], "error: the number of processes is 'two'"),
        (["2"], "error: the module is missing"),
        (["2", "--devices_per_process=0", "m"], "error: --devices_per_process=0"),
        (["2", "--device=1", "m"], "error: unknown option '--device=1'"),
    ],
)
def test_bad_arguments_are_told_in_one_line(launch, arguments, told):
    code, lines = finish(launch("", *arguments))
    assert code == 2 and len(lines) == 1 and lines[0].startswith(told)


def test_help_shows_an_example(launch):
    code, lines = finish(launch("", "--help"))
    assert code == 0 and lines[0].startswith("Usage: launch/local.sh N") and any("cipo_jax.train" in x for x in lines)
