"""Text to vector: prefixes, buckets, batches, devices."""

import dataclasses

import jax
import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.models.bert import bert_hidden, load_bert, pool
from cipo_jax.retrieval.encoder import BertEmbedder, EncoderSpec
from cipo_jax.training.metrics import CompileCounter


def _texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 40, rng.integers(0, 30))) for _ in range(count)]


def _one_by_one(embedder, folder, texts):
    """The slow reference: each text alone, without padding."""
    params = load_bert(folder, embedder.config)
    encode = jax.jit(lambda params, ids, mask: pool(bert_hidden(params, embedder.config, ids, mask), mask))
    rows = []
    for text in texts:
        words = [4 + int(word[1:]) for word in text.split()]
        ids = np.array([[2, *words[:22], 3]], np.int32)
        rows.append(np.asarray(encode(params, ids, np.ones_like(ids, bool)))[0])
    return np.stack(rows)


def test_equals_one_text_at_a_time(embedder, tiny_encoder):
    texts = _texts(9)
    expected = _one_by_one(embedder, tiny_encoder, texts)
    np.testing.assert_allclose(embedder.embed_passages(texts), expected, atol=2e-6)
    np.testing.assert_allclose(embedder.embed_queries(texts), expected, atol=2e-6)


def test_query_bits_do_not_depend_on_the_batch(embedder):
    texts = _texts(17, seed=1)
    together = embedder.embed_queries(texts)
    for chosen in ([0], [5, 3], list(range(16, -1, -1))):
        np.testing.assert_array_equal(embedder.embed_queries([texts[i] for i in chosen]), together[chosen])


def test_devices_share_a_batch(embedder, tiny_encoder):
    assert len(jax.local_devices()) == 8
    wide = BertEmbedder(str(tiny_encoder), embedder.spec, batch=2, query_batch=1, bucket=4)
    texts = _texts(37, seed=2)
    np.testing.assert_allclose(wide.embed_passages(texts), embedder.embed_passages(texts), atol=2e-6)
    np.testing.assert_allclose(wide.embed_queries(texts), embedder.embed_queries(texts), atol=2e-6)


def test_prefixes(embedder, tiny_encoder):
    spec = EncoderSpec(query_prefix="w1 ", passage_prefix="w2 w3 ", max_tokens=24)
    prefixed = BertEmbedder(str(tiny_encoder), spec, batch=4, query_batch=2, bucket=4, max_devices=1)
    np.testing.assert_array_equal(prefixed.embed_queries(["w5"]), embedder.embed_queries(["w1 w5"]))
    np.testing.assert_array_equal(prefixed.embed_passages(["w5"]), embedder.embed_passages(["w2 w3 w5"]))


def test_programs_are_bounded_by_buckets(embedder, tiny_encoder):
    fresh = BertEmbedder(str(tiny_encoder), embedder.spec, batch=4, query_batch=2, bucket=8, max_devices=1)
    for seed in range(3):
        fresh.embed_passages(_texts(19, seed))
        fresh.embed_queries(_texts(7, seed))
    assert len(fresh._programs) <= 3 + 3  # passages 8, 16, 24; queries 8, 16, 24


def test_after_the_warm_up_no_query_compiles(embedder, tiny_encoder):
    fresh = BertEmbedder(str(tiny_encoder), embedder.spec, batch=4, query_batch=2, bucket=4, max_devices=1)
    fresh.warm_up()
    texts = [" ".join(["w1"] * n) for n in range(0, 30, 2)]
    expected = fresh.embed_queries(texts)
    with CompileCounter() as compiles, jax.default_device(jax.local_devices()[3]):  # as in a host callback
        np.testing.assert_array_equal(fresh.embed_queries(texts), expected)
    assert compiles.count == 0 and len(fresh._programs) == 4  # 4, 8, 16, 24


@pytest.mark.parametrize("text", ["", "\x00", "\udce9 w1", "w1 " * 10_000, "🦊"])
def test_hostile_texts_embed(embedder, text):
    vector = embedder.embed_queries([text])
    assert vector.shape == (1, 16) and np.isclose(np.linalg.norm(vector), 1, atol=1e-6)


def test_fingerprint_tells_encoders_apart(embedder, tiny_encoder):
    same = BertEmbedder(str(tiny_encoder), embedder.spec, batch=4, bucket=4, max_devices=1)
    assert same.fingerprint == embedder.fingerprint
    other = BertEmbedder(
        str(tiny_encoder),
        dataclasses.replace(embedder.spec, pooling="cls"),
        batch=4,
        bucket=4,
        max_devices=1,
    )
    assert other.fingerprint != embedder.fingerprint


def test_bad_settings_are_user_errors(tiny_encoder, tmp_path):
    with pytest.raises(UserError, match=r"max_tokens=256 must lie in 3\.\.24"):
        BertEmbedder(str(tiny_encoder))
    with pytest.raises(UserError, match="platform='abacus'"):
        BertEmbedder(str(tiny_encoder), EncoderSpec(max_tokens=24), platform="abacus")
    with pytest.raises(UserError, match="dtype='int8'"):
        BertEmbedder(str(tiny_encoder), EncoderSpec(max_tokens=24), dtype="int8")
    with pytest.raises(UserError, match=r"config\.json"):
        BertEmbedder(str(tmp_path))
