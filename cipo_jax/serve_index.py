r"""Serves a retriever over HTTP, in Search-R1's wire format on /retrieve and ReSearch's on /batch_search.

    python -m cipo_jax.serve_index --gin_file=tasks/retrieval_minilm.gin \
        --gin_binding='CORPUS = "corpus.jsonl"' --gin_binding='ENCODER = "minilm/"' --gin_binding='INDEX = "index/"'

Listens on http://127.0.0.1:8000 unless serve_index.host and serve_index.port say otherwise; GET /health and /metrics
tell how it fares. SIGTERM finishes running requests and stops.
"""

import sys

from cipo_jax import cli
from cipo_jax.retrieval.serve import serve_index


def main() -> None:
    print("opening the corpus, the encoder and the index ...", file=sys.stderr, flush=True)
    serve_index()


if __name__ == "__main__":
    cli.run(main)
