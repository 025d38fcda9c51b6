"""Configurations and command lines that people get wrong, and what they are told."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gin
import pytest
from absl.testing import flagsaver

from cipo_jax import cli, config
from cipo_jax.errors import UserError


@gin.configurable
def toy_optimiser(learning_rate=1.0, steps=10, schedule=None):
    """Multiplies its rate by its steps."""
    return learning_rate * steps, schedule


@gin.configurable
def toy_schedule(length):
    """A schedule."""
    return length


@gin.configurable
def toy_open(**options):
    return options


@pytest.fixture
def gin_file(tmp_path, clean_gin):
    def write(text: str, name: str = "toy.gin") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def error_of(files, bindings=()) -> str:
    with pytest.raises(UserError) as caught:
        config.parse(files, bindings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bindings_win_over_files_and_values_arrive(gin_file):
    path = gin_file(
        """
        rate = 3.0
        toy_optimiser:
          learning_rate = %rate
          schedule = @toy_schedule()
        toy_schedule.length = 7
        """
    )
    config.parse([path], ["rate = 0.5"])
    assert toy_optimiser() == (5.0, 7)
    assert config.operative_config() == cli.operative_config()
    assert "toy_optimiser.steps = 10" in config.operative_config()  # defaults included
    assert "steps" not in config.config_text()


def test_includes_are_found_beside_the_file_and_in_configs_from_any_directory(gin_file, tmp_path, monkeypatch):
    gin_file("toy_optimiser.steps = 4", "parts/one.gin")
    path = gin_file("include 'parts/one.gin'")
    monkeypatch.chdir("/")
    config.parse([path])
    assert toy_optimiser() == (4.0, None)
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    other = tmp_path / "elsewhere" / "run.gin"
    other.parent.mkdir()
    other.write_text("include 'parts/one.gin'\n")
    config.parse([str(other)])
    assert toy_optimiser() == (4.0, None)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("toy_optimiser.lerning_rate = 1", ["'lerning_rate'", "did you mean 'learning_rate'"]),
        ("toy_optimizer.learning_rate = 1", ["'toy_optimizer'", "did you mean 'toy_optimiser'"]),
        ("toy_optimiser.schedule = @toy_schedul()", ["'@toy_schedul'", "did you mean 'toy_schedule'"]),
        ("toy_optimiser.schedule = [@toy_schedul()]", ["'@toy_schedul'"]),
        ("toy_optimiser.steps = %steps_totl", ["%steps_totl", "nothing defines", "did you mean 'steps_total'"]),
        ("toy_optimiser.steps = many", ["`toy_optimiser.steps = many`", "not gin"]),
        ("toy_optimiser.steps = [1", ["not gin"]),
        ("toy_optimiser.steps", ["not gin"]),
        ("toy_optimiser.schedule = %gin.REQUIRED", ["toy_optimiser.schedule must be set", "--gin_binding="]),
        ("include 'nowhere.gin'", ["no gin file 'nowhere.gin'"]),
        ("import cipo_jax.nothing", ["cannot import 'cipo_jax.nothing'"]),
    ],
)
def test_a_mistake_in_a_file_names_file_line_and_mend(gin_file, line, parts):
    path = gin_file(f"steps_total = 3\ntoy_optimiser.steps = %steps_total\n\n{line}\n")
    message = error_of([path])
    assert f"{path}:4" in message or f"{path}:5" in message
    for part in parts:
        assert part in message


def test_a_mistake_in_an_include_names_that_file(gin_file):
    gin_file("\ntoy_optimiser.stepz = 1", "part.gin")
    assert "part.gin:2: toy_optimiser has no parameter 'stepz'" in error_of([gin_file("include 'part.gin'")])


def test_a_required_macro_is_satisfied_by_a_later_binding(gin_file):
    path = gin_file("length = %gin.REQUIRED\ntoy_schedule.length = %length\n")
    assert "length must be set" in error_of([path])
    config.parse([path], ["length = 2"])
    assert toy_schedule() == 2


def test_overriding_a_name_that_nothing_uses_is_an_error(gin_file):
    path = gin_file("learning_rate = 3.0\ntoy_optimiser.learning_rate = %learning_rate\nspare = 1\n")
    message = error_of([path], ["lerning_rate = 1"])
    assert "--gin_binding 'lerning_rate = 1'" in message and "'learning_rate'" in message
    assert "nothing in the configuration uses 'zzz'" in error_of([path], ["zzz = 1"])
    assert "'learning_rate'" in error_of([gin_file("learning_rates = 1\ninclude 'toy.gin'", "run.gin")])
    config.parse([path], ["spare = 2"])  # a part's name that this experiment does not use is no mistake


def test_a_file_that_includes_itself_or_is_absent(gin_file):
    assert "includes itself" in error_of([gin_file("include 'toy.gin'")])
    assert "no gin file 'configs/absent.gin'" in error_of(["configs/absent.gin"])


def test_open_ended_and_unknown_parameters(gin_file):
    config.parse([gin_file("toy_open.anything = 1")])
    assert toy_open() == {"anything": 1}
    assert "'length' is a parameter of toy_schedule" in error_of([gin_file("qqqq.length = 1")])


def test_missing_arguments_of_a_configurable_are_the_users_error(gin_file):
    config.parse([gin_file("toy_optimiser.schedule = @toy_schedule()")])
    with pytest.raises(TypeError) as caught:
        toy_optimiser()
    assert "toy_schedule.length = ..." in str(config.as_user_error(caught.value))
    assert config.as_user_error(TypeError("unsupported operand")) is None
    assert config.as_user_error(RuntimeError("boom")) is None


def test_differences_of_two_configurations(gin_file):
    config.parse([gin_file("toy_optimiser.steps = 1\ntoy_optimiser.learning_rate = 2.0")])
    before = config.config_text()
    config.parse([gin_file(f"toy_optimiser.steps = 3\ntoy_open.text = '{'long ' * 60}'")])
    changed = config.differences(before, config.config_text())
    assert changed["toy_optimiser.steps"] == ("1", "3")
    assert changed["toy_optimiser.learning_rate"] == ("2.0", None)
    assert changed["toy_open.text"][0] is None and "long long" in changed["toy_open.text"][1]
    assert config.differences(before, before) == {}


def test_names_are_listed_with_parameters():
    listing = config.describe("toy_opt")
    assert "toy_optimiser" in listing and ".steps = 10" in listing and "Multiplies its rate" in listing
    assert ".length  (required)" in config.describe("toy_schedule")


PROGRAM = '''
"""Says what it was given.

Example:
  python -m program --gin_file=x.gin --run_dir=runs/x
"""
import time

from absl import flags

from cipo_jax import cli

flags.DEFINE_integer("extra", 3, "A number of its own.")


def main(run_dir):
    print("sleeping", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    cli.run(main, run_dir=True)
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def start(program: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@gin.configurable
def toy_act(what="return", run_dir=None):
    if what == "user":
        raise UserError("x=3 is odd; use 4.")
    if what == "bug":
        raise ValueError("a bug")
    if what == "write":
        (run_dir / "deep" / "file").write_text("x")
    if what == "read":
        Path("/nowhere/at/all").read_text()
    return 5


@pytest.fixture
def run(capsys, clean_gin):
    """Runs `toy_act` through the command line in this process: exit code and what was told."""

    def run(*arguments: str) -> tuple[int, str]:
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
            cli.run(lambda run_dir: toy_act(run_dir=run_dir), run_dir=True, doc="", argv=["toy", *arguments])
        return left.value.code, capsys.readouterr().err

    return run


def test_help_teaches(program):
    process = start(program, "--help")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and not err
    for part in (
        "Says what it was given.",
        "python -m program --gin_file=x.gin",
        "--gin_binding=",
        "--run_dir=DIR",
        "--extra=EXTRA",
        "A number of its own. (default: 3)",
    ):
        assert part in out


def test_exit_codes_and_one_sentence_errors(run, tmp_path):
    where = f"--run_dir={tmp_path / 'r'}"
    assert run(where) == (5, "")
    cases = {
        (where, "--gin_binding=toy_act.what='user'"): "error: x=3 is odd; use 4.\n",
        (where, "--gin_binding=toy_act.wat='user'"): "error: --gin_binding 'toy_act.wat='user'': toy_act has no param",
        (where, "--gin_bindin=toy_act.what='user'"): "error: Unknown command line flag 'gin_bindin'",
        (where, "stray"): "error: Unexpected argument 'stray'",
        (where, "--gin_binding=toy_act.what='write'"): f"error: Cannot write {tmp_path / 'r' / 'deep' / 'file'}: No su",
        ("--run_dir=",): "error: --run_dir is not set",
    }
    for arguments, told in cases.items():
        code, err = run(*arguments)
        assert code == 2 and err.startswith(told) and err.count("\n") == 1, (arguments, err)


def test_a_bug_keeps_its_traceback(tmp_path, clean_gin):
    for what, kind in {"bug": ValueError, "read": FileNotFoundError}.items():
        argv = ["toy", f"--run_dir={tmp_path}", f"--gin_binding=toy_act.what='{what}'"]
        with flagsaver.flagsaver(), pytest.raises(kind):
            cli.run(lambda run_dir: toy_act(run_dir=run_dir), run_dir=True, doc="", argv=argv)


def test_interrupt_ends_with_130(program, tmp_path):
    process = start(program, f"--run_dir={tmp_path}")
    assert process.stdout.readline() == "sleeping\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "Interrupted.\n"
