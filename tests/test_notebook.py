"""The notebook runs on a small finished run directory and shows what is in it."""

import json
import os

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.evaluation import report, scripted
from cipo_jax.evaluation.behaviour import judge_all, summarise
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.rollout.episode import read_episodes
from cipo_jax.training.metrics import MetricsWriter
from cipo_jax.training.samples import samples_path, write_samples

STEPS = 6


def finished_run(path):
    """A run whose agent follows its memory before and the passages after; the first question never changes."""
    split = SyntheticTask(seed=5, conflict_questions=3).reported()["conflict"]
    protocol = SearchR1(build_tokenizer())
    retrievers = {name: sparse_retriever(ListCorpus(world.corpus)) for name, world in split.worlds.items()}
    metrics = {}
    for step, agents in ((0, [scripted.memory] * 3), (STEPS, [scripted.memory] + [scripted.oracle] * 2)):
        demos = []
        for question, agent in zip(split.questions, agents):
            retriever = retrievers[question.corpus]
            turns = agent(question, split.worlds[question.corpus], lambda q, r=retriever: r.retrieve([q], 2)[0])
            demos.append(scripted.Demonstration(question.question, tuple(turns)))
        trajectories = scripted.demonstration_trajectories(demos, protocol, 400)
        episodes = read_episodes(trajectories, split.questions, protocol)
        metrics[step] = summarise(episodes, split.worlds)
        write_samples(
            samples_path(path, step),
            f"step {step}",
            trajectories,
            episodes,
            protocol.tokenizer,
            behaviours=judge_all(episodes, split.worlds),
            token_ealr=np.full(trajectories.tokens.shape, 0.5),
        )
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step in range(STEPS):
            record = {name: 0.1 * step for name in ("em", "prior_driven", "evidence_driven", "malformed", "ealr")}
            writer.write(step, record | {"searches": 2.0})
        for step, values in metrics.items():
            writer.write(step, {f"validation/{name}": value for name, value in values.items()})
    summary = report.make_summary(
        method="cipo",
        seed=5,
        steps=STEPS,
        wall_s=90.0,
        params=12_345,
        compiles_after_warmup=0,
        before=metrics[0],
        after=metrics[STEPS],
    )
    report.write_summary(path / "summary.json", summary)
    return split.questions


def execute(repository, run_dir, monkeypatch):
    monkeypatch.setenv("CIPO_RUN_DIR", str(run_dir))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(repository / "notebooks" / "quickstart.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(repository / "notebooks")}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return outputs, [dict(output.get("data", {})) for output in outputs]


def test_notebook_shows_the_run(tmp_path, repository, monkeypatch):
    questions = finished_run(tmp_path)
    outputs, data = execute(repository, tmp_path, monkeypatch)
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    markdown = [d["text/markdown"] for d in data if "text/markdown" in d]
    assert "| before | 0.00 | 0.00 | 1.00 | 0.00 | 0.00 | 0.00 | 2.00 |" in markdown[0]
    assert "| after | 0.67 | 0.67 | 0.33 | 0.67 | 0.00 | 0.00 | 2.00 |" in markdown[0]
    assert markdown[1:] == ["**Before** (step_000000)", "**After** (step_000006)"]
    assert len([d for d in data if len(d.get("image/png", "")) > 10_000]) == 1
    before, after = (d["text/html"] for d in data if "text/html" in d)
    turned = questions[1]  # the first one that changed
    for page in (before, after):
        assert turned.question in page and f'data-question="{turned.id}"' in page
    assert f"&lt;answer&gt; {turned.meta['prior_answer']} &lt;" in before.replace("</span>", "").replace(
        '<span style="background:rgba(9,105,218,0.09)" title="+0.50 nats">', ""
    )
    assert 'class="badge prior_driven"' in before and 'class="badge evidence_driven"' in after
    text = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "cipo, seed 5: 6 steps, 1.5 minutes" in text and "12,345 parameters" in text


def test_notebook_names_a_missing_run(tmp_path, repository, monkeypatch):
    with pytest.raises(CellExecutionError, match=r"holds no metrics\.jsonl; train first"):
        execute(repository, tmp_path / "absent", monkeypatch)


def test_notebook_is_committed_without_a_machines_paths(repository):
    raw = (repository / "notebooks" / "quickstart.ipynb").read_text()
    assert json.loads(raw)["metadata"]["kernelspec"]["name"] == "python3"
    assert "/home/" not in raw and "/work/" not in raw
