r"""Embeds a corpus and builds vector indices over it; run it again to resume after a kill.

    python -m cipo_jax.build_index --gin_file=tasks/retrieval_minilm.gin \
        --gin_binding='CORPUS = "corpus.jsonl"' --gin_binding='ENCODER = "minilm/"' --gin_binding='INDEX = "index/"'

Tells passages per second and the time left while it embeds, the memory each index needs before it starts, and the
recall of each index against exact search.
"""

import json

from cipo_jax import cli
from cipo_jax.retrieval.build import build_index


def main() -> None:
    print(json.dumps(build_index(), indent=1))


if __name__ == "__main__":
    cli.run(main)
