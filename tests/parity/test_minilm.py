"""The real all-MiniLM-L6-v2 through the JAX encoder."""

import numpy as np
from minilm import minilm

from cipo_jax.retrieval.encoder import BertEmbedder


def test_minilm_knows_meaning():
    real = BertEmbedder(str(minilm()), max_devices=1)
    passages = ["Paris is the capital of France.", "A cat sleeps on the sofa.", "Mount Everest is 8,849 m high."]
    queries = ["which city governs the French", "kitten resting on furniture", "tallest mountain elevation"]
    scores = real.embed_queries(queries) @ real.embed_passages(passages).T
    assert scores.argmax(-1).tolist() == [0, 1, 2]
    # transformers 5.24 with torch 2.13 in float32 says:
    np.testing.assert_allclose(scores[0], [0.73273945, 0.02339424, -0.07430001], atol=1e-5)
