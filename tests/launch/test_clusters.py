"""`launch/tpu_pod.sh` and `launch/slurm_gpu.sh` call gcloud and srun, here programs that print what they were given."""

import os
import subprocess

import pytest


@pytest.fixture
def launch(tmp_path, repository):
    for name in ("gcloud", "srun"):
        (tmp_path / name).write_text('#!/bin/bash\nprintf "%s\\n" "$CIPO_DISTRIBUTED" "$@"\n')
        (tmp_path / name).chmod(0o755)

    def launch(script, *arguments, **environment):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CIPO", "PYTHON"))}
        env |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment}
        done = subprocess.run(
            [repository / "launch" / script, *arguments], env=env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    return launch


def remote(tmp_path, command, program, module):
    """Runs the command line that a TPU host would get, in a home directory where `program` is the module."""
    (tmp_path / "home" / "my code").mkdir(parents=True)
    (tmp_path / "home" / "my code" / f"{module}.py").write_text(program)
    return subprocess.Popen(["bash", "-c", command], cwd=tmp_path / "home", stdout=subprocess.PIPE, text=True)


def test_every_tpu_host_gets_the_module_with_its_arguments_whole(launch, tmp_path):
    binding = "--gin_binding=SHAPE = 'a $b'"
    code, lines, _ = launch("tpu_pod.sh", "pod", "--zone=z", "--dir=my code", "prints", binding)
    assert code == 0
    assert lines[1:8] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=z", "--worker=all"]
    command = lines[8].removeprefix("--command=")
    program = "import os, sys\nprint(os.environ['CIPO_DISTRIBUTED'], sys.argv[1:], os.getpid())"
    host = remote(tmp_path, command, program, "prints")
    assert host.communicate(timeout=60)[0].strip() == f"auto {[binding]} {host.pid}"


def test_stop_signals_what_runs_on_a_tpu_host(launch, tmp_path):
    start = launch("tpu_pod.sh", "pod", "--dir=my code", "waits")[1][-1].removeprefix("--command=")
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("stopped"), sys.exit(0)))
print("running", flush=True)
time.sleep(60)
"""
    host = remote(tmp_path, start, program, "waits")
    assert host.stdout.readline() == "running\n"
    stop = launch("tpu_pod.sh", "pod", "--dir=my code", "--stop")[1][-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", stop], cwd=tmp_path / "home", check=True, timeout=60)
    assert host.communicate(timeout=60)[0] == "stopped\n" and host.returncode == 0


def test_slurm_starts_one_process_per_gpu(launch):
    binding = "--gin_binding=SEED = 1"
    code, lines, _ = launch("slurm_gpu.sh", "cipo_jax.train", binding, SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="4")
    assert code == 0
    assert lines[0] == "auto" and "--ntasks-per-node=4" in lines
    assert lines[-4:] == ["python", "-m", "cipo_jax.train", binding]


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("tpu_pod.sh", [], "name of the TPU slice is missing"),
        ("tpu_pod.sh", ["--zone=z"], "name of the TPU slice is missing"),
        ("tpu_pod.sh", ["pod"], "module is missing"),
        ("tpu_pod.sh", ["pod", "--zones=z", "cipo_jax.train"], "unknown option '--zones=z'"),
        ("tpu_pod.sh", ["pod", "--stop", "cipo_jax.train"], "--stop takes no module"),
        ("slurm_gpu.sh", [], "module is missing"),
        ("slurm_gpu.sh", ["--nodes=2"], "before '--nodes=2'"),
        ("slurm_gpu.sh", ["cipo_jax.train"], "submit it with sbatch"),
    ],
)
def test_a_mistake_is_told_in_one_line(launch, script, arguments, message):
    code, lines, error = launch(script, *arguments)
    assert code == 2 and not lines
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("script", ["tpu_pod.sh", "slurm_gpu.sh"])
def test_help_shows_a_command_to_copy(launch, script):
    code, lines, _ = launch(script, "--help")
    assert code == 0 and any("configs/experiments/" in line for line in lines)
