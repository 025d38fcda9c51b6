"""Encoding speed and agreement: this package's encoder against sentence-transformers and transformers.

    python -m cipo_jax.benchmarks.retrieval_encoding --encoder=MINILM_FOLDER --corpus=passages.jsonl \
        --peer_python=OTHER_VENV/bin/python --json=out.json

Same machine, texts, float32 and batch; rounds alternate between the two programs, and medians are compared. The peer
runs in its own process (and, with --peer_python, in its own environment: it needs sentence-transformers and torch).
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from cipo_jax.benchmarks.report import write_report
from cipo_jax.retrieval.corpus import FileCorpus
from cipo_jax.retrieval.encoder import BertEmbedder, EncoderSpec

FLAGS = flags.FLAGS
flags.DEFINE_string("encoder", None, "Folder of a sentence-transformers BERT encoder.", required=True)
flags.DEFINE_string("corpus", None, "JSON-lines corpus.", required=True)
flags.DEFINE_string("peer_python", sys.executable, "Python that can import sentence_transformers.")
flags.DEFINE_integer("texts", 1024, "Texts per round.")
flags.DEFINE_integer("parity_texts", 0, "Texts to compare vectors of; 0: those of a round.")
flags.DEFINE_integer("batch", 32, "Texts per step, for both.")
flags.DEFINE_integer("rounds", 5, "Rounds of each.")
flags.DEFINE_string("json", None, "File for the numbers.")

_PEER = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
folder, texts_file, out_file, batch = sys.argv[1:5]
texts = json.load(open(texts_file))
model = SentenceTransformer(folder, device="cpu")
model.max_seq_length = 256
model.encode(texts[: 2 * int(batch)], batch_size=int(batch))
print("ready", flush=True)
for line in sys.stdin:
    count = int(line)
    begin = time.perf_counter()
    vectors = model.encode(texts[:count], batch_size=int(batch), normalize_embeddings=True)
    seconds = time.perf_counter() - begin
    np.save(out_file, vectors)
    print(seconds, flush=True)
"""


def main(_) -> None:
    corpus = FileCorpus(FLAGS.corpus)
    wanted = max(FLAGS.texts, FLAGS.parity_texts)
    texts = [corpus.passage(row).contents for row in range(min(wanted, len(corpus)))]
    timed = texts[: FLAGS.texts]
    embedder = BertEmbedder(FLAGS.encoder, EncoderSpec(), batch=FLAGS.batch)
    embedder.embed_passages(timed)  # compiles every bucket
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "texts.json").write_text(json.dumps(texts))
        peer = subprocess.Popen(
            [FLAGS.peer_python, "-c", _PEER, FLAGS.encoder, f"{scratch}/texts.json", f"{scratch}/out.npy",
             str(FLAGS.batch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

        def ask(count: int) -> float:
            peer.stdin.write(f"{count}\n")
            peer.stdin.flush()
            return float(peer.stdout.readline())

        while peer.stdout.readline().strip() != "ready":
            pass
        ours, theirs = [], []
        for _ in range(FLAGS.rounds):
            begin = time.perf_counter()
            embedder.embed_passages(timed)
            ours.append(time.perf_counter() - begin)
            theirs.append(ask(len(timed)))
        ask(len(texts))
        reference = np.load(f"{scratch}/out.npy")
        peer.stdin.close()
        peer.wait()
    cosine = np.sum(reference.astype(np.float64) * embedder.embed_passages(texts), axis=1)
    ours_median, theirs_median = statistics.median(ours), statistics.median(theirs)
    write_report(
        {
            "texts": len(timed),
            "batch": FLAGS.batch,
            "ours_passages_per_s": len(timed) / ours_median,
            "sentence_transformers_passages_per_s": len(timed) / theirs_median,
            "ratio": theirs_median / ours_median,
            "ratio_per_round": [t / o for t, o in zip(theirs, ours)],
            "compared": len(texts),
            "min_cosine": float(cosine.min()),
        },
        FLAGS.json,
    )


if __name__ == "__main__":
    app.run(main)
