"""A model folder, question files and a passage file: trained, evaluated and exported like a user's own."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from cipo_jax.convert import convert
from cipo_jax.data.tokenizer import save_tokenizer
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluate import evaluate
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.models.export import export_decoder
from cipo_jax.models.weights import checkpoint_decoder, load_decoder
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus_formats import open_corpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.loop import Run, train
from cipo_jax.training.progress import Progress
from cipo_jax.training.qa_task import qa_task
from cipo_jax.training.run_dir import open_run_dir
from cipo_jax.training.step import Method

DECODER = DecoderConfig(vocab_size=960, width=32, depth=1, heads=2, kv_heads=2, head_dim=16, ffn=64)
ROLLOUT = RolloutConfig(
    max_turns=1, top_k=1, prompt_tokens=32, action_tokens=16, observation_tokens=32, total_tokens=96, query_tokens=16,
    chunk=16,
)  # fmt: skip


def one_device():
    return mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """model/, corpus.jsonl and questions.jsonl."""
    folder = tmp_path_factory.mktemp("files")
    _, params = init_decoder(DECODER, 1, ShardingRules(one_device()))
    export_decoder(folder / "model", DECODER, params)
    save_tokenizer(folder / "model")
    passages = [{"id": str(i), "contents": f"Place {i}\nThe river of place {i} is number {i}."} for i in range(6)]
    questions = [
        {"id": f"q{i}", "question": f"river of place {i}?", "golden_answers": [f"number {i}"]} for i in range(6)
    ]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def task(files: Path, **changes):
    questions = str(files / "questions.jsonl")
    arguments = {"train": questions, "validation": questions, "reported": {"test": questions}, "validation_limit": 2}
    retriever = sparse_retriever(open_corpus(str(files / "corpus.jsonl")))
    protocol = functools.partial(SearchR1, instruction="{question}\n")
    return qa_task(model=str(files / "model"), retriever=retriever, protocol=protocol, **(arguments | changes))


@pytest.fixture(scope="module")
def run(files) -> Run:
    return Run(
        task=lambda: task(files),
        decoder=checkpoint_decoder(str(files / "model")),
        weights=str(files / "model"),
        rollout=ROLLOUT,
        method=Method(questions=2, samples=2, minibatches=1),
        steps=1,
        eval_every=1,
        eval_batch=2,
        mesh=one_device,
    )


def test_a_run_starts_from_the_folder_and_its_checkpoint_is_evaluated_and_exported(run, files, tmp_path):
    summary = train(run, lambda: open_run_dir(tmp_path / "run"), Progress(quiet=True))
    assert summary["before"]["em"] == 0 and summary["compiles_after_warmup"] == 0

    report = evaluate(run, tmp_path / "before")
    assert report["policy"] == str(files / "model")
    assert report["sets"]["test"]["em"] == summary["before"]["em"]
    assert report["sets"]["test"]["episodes"] == 6
    lines = [json.loads(line) for line in (tmp_path / "before/predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"q{i}" for i in range(6)]
    assert lines[3]["golden_answers"] == ["number 3"] and lines[3]["em"] == 0
    assert "river of place 0" in (tmp_path / "before/samples.html").read_text()

    after = evaluate(run, tmp_path / "after", str(tmp_path / "run"), step=1)
    assert after["policy"].endswith("step 1")
    convert(source=str(files / "model"), target=str(tmp_path / "hf"), checkpoint=str(tmp_path / "run/checkpoints"))
    rules = ShardingRules(one_device())
    there, here = (load_decoder(folder, rules).params for folder in (files / "model", tmp_path / "hf"))
    assert jax.tree.map(np.shape, there) == jax.tree.map(np.shape, here)
    exported = dataclasses.replace(run, weights=str(tmp_path / "hf"))
    assert evaluate(exported, tmp_path / "exported")["sets"] == after["sets"]


def test_another_decoder_than_the_checkpoints_is_refused(run, tmp_path):
    wrong = dataclasses.replace(run, decoder=dataclasses.replace(run.decoder, rope_theta=1e4))
    with pytest.raises(UserError, match=r"DecoderConfig.rope_theta=10000.0, but .*model has 1000000.0"):
        train(wrong, lambda: open_run_dir(tmp_path / "run"), Progress(quiet=True))
    assert not (tmp_path / "run").exists()


def test_several_files_may_use_the_same_ids(files):
    questions = str(files / "questions.jsonl")
    joined = task(files, train=[questions, questions]).train
    assert [q.question for q in joined] == [q.question for q in task(files).train] * 2
    (files / "other").mkdir()
    (files / "other/questions.jsonl").write_text((files / "questions.jsonl").read_text())
    paths = [questions, str(files / "other/questions.jsonl")]
    assert [q.id for q in task(files, validation=paths, validation_limit=None).validation] == [
        f"{path}:q{i}" for path in paths for i in range(6)
    ]


def test_empty_question_sets_are_named(files):
    with pytest.raises(UserError, match="reported is empty"):
        task(files, reported={})
    (files / "none.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"qa_task.reported\['x'\]=.*none.jsonl' holds no question"):
        task(files, reported={"x": str(files / "none.jsonl")})


def test_a_checkpoint_that_is_not_there_is_named(run, tmp_path):
    with pytest.raises(UserError, match="--checkpoint=nowhere is no directory"):
        evaluate(run, tmp_path / "out", "nowhere")
