"""Kills build_index at random moments, resumes it, and compares its bytes with those of an unbroken build.

    python -m cipo_jax.benchmarks.retrieval_kill --encoder=MINILM_FOLDER --corpus=passages.jsonl --scratch=FOLDER \
        --kills=5 --passages=1024 --json=out.json

Each trial begins anew and is killed with SIGKILL at a moment drawn uniformly from the length of the unbroken build,
start-up included, then resumed. SCRATCH must be empty or absent.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from cipo_jax.benchmarks.report import write_report
from cipo_jax.errors import UserError
from cipo_jax.retrieval.store import EmbeddingStore, digest

FLAGS = flags.FLAGS
flags.DEFINE_string("encoder", None, "Folder of a BERT encoder.", required=True)
flags.DEFINE_string("corpus", None, "JSON-lines corpus.", required=True)
flags.DEFINE_string("scratch", None, "Empty folder for the builds.", required=True)
flags.DEFINE_integer("passages", 1024, "First passages of the corpus to use.")
flags.DEFINE_integer("chunk_rows", 64, "Passages between two commits.")
flags.DEFINE_integer("kills", 5, "How many.")
flags.DEFINE_integer("seed", 0, "Of the moments.")
flags.DEFINE_string("json", None, "File for the numbers.")


def _start(corpus: Path, index: Path) -> subprocess.Popen:
    bindings = {
        "CORPUS": f'"{corpus}"', "ENCODER": f'"{FLAGS.encoder}"', "INDEX": f'"{index}"',
        "build_index.chunk_rows": FLAGS.chunk_rows,
    }  # fmt: skip
    arguments = [f"--gin_binding={name} = {value}" for name, value in bindings.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "cipo_jax.build_index", "--gin_file=tasks/retrieval_minilm.gin", *arguments],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _array(index: Path) -> dict[str, str]:
    return {p.name: digest(p.read_bytes()) for p in (index / "embeddings" / "embeddings").iterdir()}


def main(_) -> None:
    scratch = Path(FLAGS.scratch)
    if scratch.exists() and any(scratch.iterdir()):
        raise UserError(f"--scratch={scratch} is not empty; give an empty folder")
    scratch.mkdir(parents=True, exist_ok=True)
    corpus, whole = scratch / "corpus.jsonl", scratch / "whole"
    with open(FLAGS.corpus, "rb") as source:
        corpus.write_bytes(b"".join(line for line, _ in zip(source, range(FLAGS.passages))))
    begin = time.monotonic()
    if _start(corpus, whole).wait():
        raise RuntimeError("the unbroken build failed")
    length = time.monotonic() - begin
    reference = _array(whole)
    rng = np.random.default_rng(FLAGS.seed)
    kills = []
    for trial in range(FLAGS.kills):
        broken = scratch / f"broken{trial}"
        process = _start(corpus, broken)
        moment = rng.uniform(0, length)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        begun = (broken / "embeddings" / "store.json").exists()
        done = len(EmbeddingStore.open(broken / "embeddings").declared()) if begun else 0
        if _start(corpus, broken).wait():
            raise RuntimeError("the resumed build failed")
        kills.append(
            {
                "killed_after_s": moment,
                "chunks_done": done,
                "exit_code": process.returncode,
                "embeddings_identical": _array(broken) == reference,
                "index_identical": digest((broken / "index-Flat" / "index.faiss").read_bytes())
                == digest((whole / "index-Flat" / "index.faiss").read_bytes()),
            }
        )
    report = {
        "passages": FLAGS.passages,
        "chunks": EmbeddingStore.open(whole / "embeddings").chunks,
        "unbroken_s": length,
        "kills": kills,
        "all_identical": all(k["embeddings_identical"] and k["index_identical"] for k in kills),
    }
    write_report(report, FLAGS.json)


if __name__ == "__main__":
    app.run(main)
