"""Turns HippoRAG's HotpotQA and 2Wiki files into this project's corpora and question sets.

    python -m cipo_jax.benchmarks.retrieval_hipporag --source=hipporag/ --out=scratch/

Writes `hotpotqa.corpus.jsonl`, `hotpotqa.questions.jsonl` (with the titles of the supporting passages) and
`2wikimultihopqa.corpus.jsonl`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("source", None, "HippoRAG's data folder.", required=True)
flags.DEFINE_string("out", None, "Folder for the JSON-lines files.", required=True)


def _write(path: Path, records: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def main(_) -> None:
    source, out = Path(FLAGS.source), Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    hotpot = json.loads((source / "hotpotqa_train_corpus.json").read_text())
    passages = ({"id": str(i), "title": t, "text": "".join(s)} for i, (t, s) in enumerate(hotpot.items()))
    _write(out / "hotpotqa.corpus.jsonl", passages)
    questions = json.loads((source / "hotpotqa_train.json").read_text())
    rows = (
        {
            "id": q["_id"],
            "question": q["question"],
            "golden_answers": [q["answer"]],
            "metadata": {"supporting_titles": sorted({title for title, _ in q["supporting_facts"]})},
        }
        for q in questions
    )
    _write(out / "hotpotqa.questions.jsonl", rows)
    wiki = json.loads((source / "2wikimultihopqa_corpus.json").read_text())
    passages = ({"id": str(i), "title": p["title"], "text": p["text"]} for i, p in enumerate(wiki))
    _write(out / "2wikimultihopqa.corpus.jsonl", passages)


if __name__ == "__main__":
    app.run(main)
