"""Runs that cannot work end with code 2 and one sentence that names the thing and the mend, before anything is written."""

import json
from pathlib import Path

import pytest
import tiny_run
from absl.testing import flagsaver

from cipo_jax import build_index, cli, train


@pytest.fixture
def told(capfd, clean_gin):
    """Runs an entry point in this process, on the eight simulated devices, and returns what it told on stderr."""

    def told(main, flags: list[str], run_dir: bool = True) -> str:
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
            cli.run(main, run_dir=run_dir, argv=["program", *flags])
        out, err = capfd.readouterr()
        assert left.value.code == 2 and not out
        assert err.startswith("error: ") and err.count("\n") == 1, err
        return err.removeprefix("error: ")

    return told


FITS = ("Method.questions = 8",)  # over eight devices


@pytest.mark.parametrize(
    ("binding", "sentence"),
    [
        ("Run.stepz = 3", "--gin_binding 'Run.stepz = 3': Run has no parameter 'stepz'; did you mean 'steps'?\n"),
        ("Metod.samples = 3", "nothing configurable is called 'Metod'; did you mean 'Method'?\n"),
        (
            "Method.outcome_reward = @f1_fromat",
            "nothing configurable is called '@f1_fromat'; did you mean 'f1_format'?",
        ),
        ("STAEL = 0.1", "nothing in the configuration uses 'STAEL'; did you mean 'STALE'?\n"),
        (
            "Method.questions = 12",
            "Method.questions=12 does not divide over 8 data shards; use a multiple of 8\n",
        ),
        ("Run.eval_batch = 6", "Run.eval_batch=6 does not divide over 8 data shards; use a multiple of 8\n"),
        ("mesh.tensor = 3", "there are 8; set mesh.replica, mesh.fsdp and mesh.tensor to a product of 8\n"),
        ("RolloutConfig.prompt_tokens = 6", "more than RolloutConfig.prompt_tokens=6; raise that to at least "),
        ("DecoderConfig.width = 36", "'embed'"),
        ("SyntheticTask.stale = 1.5", "SyntheticTask.stale=1.5 is no probability; use 0 to 1.\n"),
    ],
)
def test_settings(told, tmp_path, binding, sentence):
    err = told(train.main, tiny_run.arguments(tmp_path / "run", *FITS, binding))
    assert sentence in err
    assert not (tmp_path / "run").exists()


def test_a_misspelt_name_in_a_file_is_told_with_its_line(told, tmp_path):
    path = tmp_path / "mine.gin"
    path.write_text("include 'quickstart.gin'\n\nMethod.sampels = 2\n")
    err = told(train.main, tiny_run.arguments(tmp_path / "run", gin_file=str(path)))
    assert err == f"{path}:3: Method has no parameter 'sampels'; did you mean 'samples'?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["file", "kernel"])
def test_a_directory_that_cannot_be_made(told, tmp_path, place):
    path = {"file": tmp_path / "file" / "run", "kernel": Path("/proc/run")}[place]
    (tmp_path / "file").write_text("kept")
    err = told(train.main, tiny_run.arguments(path, *FITS))
    assert err.startswith(f"--run_dir {path} cannot be written (")
    assert err.endswith("choose a directory you may write to.\n")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_directory_with_outputs_of_unknown_origin(told, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    err = told(train.main, tiny_run.arguments(tmp_path, *FITS))
    assert "holds metrics.jsonl but no config.gin" in err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_of_a_corpus(told, tmp_path):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    rows = [json.dumps({"id": str(i), "title": "t", "text": "x"}) for i in range(3)]
    corpus.write_text("\n".join([*rows[:2], '{"id": "2", "title": ', rows[2]]) + "\n")
    flags = ["--gin_file=tasks/retrieval_minilm.gin", f'--gin_binding=CORPUS = "{corpus}"']
    flags += [f'--gin_binding=ENCODER = "{tmp_path}"', f'--gin_binding=INDEX = "{index}"']
    err = told(build_index.main, flags, run_dir=False)
    assert f"{corpus}:3: " in err
    assert not index.exists()
