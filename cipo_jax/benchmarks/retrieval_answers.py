"""How often the top passages hold an answer, by index type, for question sets over one corpus.

    python -m cipo_jax.benchmarks.retrieval_answers --encoder=MINILM_FOLDER --corpus=passages.jsonl --index=FOLDER \
        --questions=nq_test.jsonl --questions=popqa_test.jsonl --json=out.json

Builds what is missing in FOLDER first (embeddings are resumed). A passage holds an answer when a gold occurs in
its title or text, normalised, on token borders. Questions with no answer anywhere in the corpus are counted, not left
out. Where a question names its supporting titles (HotpotQA), the share of questions with all of them in the top k is
given too.
"""

import time
from pathlib import Path

import numpy as np
from absl import app, flags

from cipo_jax.benchmarks.report import write_report
from cipo_jax.data.questions import load_questions
from cipo_jax.retrieval.build import build_index
from cipo_jax.retrieval.corpus_formats import open_corpus
from cipo_jax.retrieval.dense import dense_retriever
from cipo_jax.retrieval.encoder import BertEmbedder
from cipo_jax.retrieval.fusion import FusedRetriever
from cipo_jax.retrieval.index import IndexSpec
from cipo_jax.retrieval.lexical import Bm25Retriever
from cipo_jax.rewards.scores import normalise

FLAGS = flags.FLAGS
flags.DEFINE_string("encoder", None, "Folder of a BERT encoder.", required=True)
flags.DEFINE_string("corpus", None, "JSON-lines corpus.", required=True)
flags.DEFINE_string("index", None, "Folder for embeddings and indices.", required=True)
flags.DEFINE_multi_string("questions", [], "Question sets in FlashRAG's format.")
flags.DEFINE_multi_string("factory", ["Flat", "IVF90,SQ8", "HNSW32"], "Dense indices; fusion takes the first.")
flags.DEFINE_integer("nprobe", 32, "Lists visited (IVF).")
flags.DEFINE_multi_integer("top_k", [1, 3, 5], "Passages looked at.")
flags.DEFINE_string("json", None, "File for the numbers.")


def main(_) -> None:
    corpus = open_corpus(FLAGS.corpus, FLAGS.index)
    embedder = BertEmbedder(FLAGS.encoder)
    specs = [IndexSpec(factory, nprobe=FLAGS.nprobe, threads=1) for factory in FLAGS.factory]
    begin = time.monotonic()
    built = build_index(corpus, embedder, FLAGS.index, specs)
    build_seconds = time.monotonic() - begin
    retrievers = {s.factory: dense_retriever(corpus, embedder, FLAGS.index, s) for s in specs}
    retrievers["bm25"] = Bm25Retriever(corpus)
    retrievers[f"fusion of {FLAGS.factory[0]} and bm25"] = FusedRetriever(
        [retrievers[FLAGS.factory[0]], retrievers["bm25"]]
    )
    texts = [f" {normalise(corpus.passage(row).contents)} " for row in range(len(corpus))]
    depth = max(FLAGS.top_k)
    report: dict = {"passages": len(corpus), "build_seconds": build_seconds, "built": built, "sets": {}}
    for path in FLAGS.questions:
        questions = load_questions(path)
        golds = [[f" {g} " for g in map(normalise, q.golds) if g] for q in questions]
        ceiling = np.mean([any(g in text for g in own for text in texts) for own in golds])
        scores: dict = {"questions": len(questions), "answer_anywhere": float(ceiling)}
        for name, retriever in retrievers.items():
            begin = time.monotonic()
            answers = retriever.retrieve([q.question for q in questions], depth)
            seconds = time.monotonic() - begin
            held = np.array(
                [[any(g in texts[p.row] for g in own) for p in found] + [False] * (depth - len(found))
                 for own, found in zip(golds, answers)]
            )  # fmt: skip
            entry = {f"answer_in_top_{k}": float(held[:, :k].any(1).mean()) for k in FLAGS.top_k}
            wanted = [set(q.meta.get("supporting_titles", ())) for q in questions]
            if all(wanted):
                for k in FLAGS.top_k:
                    shown = [{p.title for p in found[:k]} for found in answers]
                    entry[f"all_support_in_top_{k}"] = float(np.mean([w <= s for w, s in zip(wanted, shown)]))
            scores[name] = {**entry, "queries_per_second": len(questions) / seconds}
        report["sets"][Path(path).stem] = scores
    write_report(report, FLAGS.json)


if __name__ == "__main__":
    app.run(main)
