"""The BERT encoder against transformers' numbers and against its own padding."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cipo_jax.errors import UserError
from cipo_jax.models.bert import BertConfig, bert_hidden, load_bert, pool

GOLDEN = Path(__file__).parent / "golden" / "bert"


@pytest.fixture(scope="module")
def tiny():
    config = BertConfig.from_file(GOLDEN / "config.json")
    expected = {k: np.array(v) for k, v in json.loads((GOLDEN / "expected.json").read_text()).items()}
    return config, load_bert(GOLDEN, config), expected


def _mask(lengths, width):
    return np.arange(width) < np.asarray(lengths)[:, None]


def test_equals_transformers(tiny):
    config, params, expected = tiny
    mask = _mask(expected["lengths"], 24)
    hidden = bert_hidden(params, config, expected["ids"].astype(np.int32), mask)
    np.testing.assert_allclose(np.where(mask[..., None], hidden, 0), expected["hidden"], atol=2e-5)
    np.testing.assert_allclose(pool(hidden, mask, "mean", True), expected["mean"], atol=2e-6)
    np.testing.assert_allclose(pool(hidden, mask, "cls", False), expected["cls"], atol=2e-5)


def test_padding_neither_sees_nor_is_seen(tiny):
    config, params, expected = tiny
    ids = expected["ids"].astype(np.int32)
    encode = jax.jit(lambda i, m: pool(bert_hidden(params, config, i, m), m))
    together = np.asarray(encode(ids, _mask(expected["lengths"], 24)))
    garbage = np.where(_mask(expected["lengths"], 24), ids, 49)
    np.testing.assert_array_equal(encode(garbage, _mask(expected["lengths"], 24)), together)
    for row, length in enumerate(expected["lengths"]):
        alone = encode(ids[row : row + 1, :length], np.ones((1, length), bool))
        np.testing.assert_allclose(alone[0], together[row], atol=2e-6)


def test_empty_row_is_finite(tiny):
    config, params, _ = tiny
    vectors = pool(
        bert_hidden(params, config, jnp.zeros((2, 4), jnp.int32), np.zeros((2, 4), bool)), np.zeros((2, 4), bool)
    )
    assert np.isfinite(vectors).all()


def test_bfloat16_stays_close(tiny):
    config, params, expected = tiny
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), params)
    mask = _mask(expected["lengths"], 24)
    vectors = pool(bert_hidden(half, config, expected["ids"].astype(np.int32), mask), mask)
    assert vectors.dtype == jnp.float32
    assert np.sum(np.asarray(vectors) * expected["mean"], -1).min() > 0.995


def test_pool_by_hand():
    hidden = jnp.array([[[3.0, 0.0], [0.0, 8.0], [100.0, 100.0]]])
    mask = np.array([[True, True, False]])
    np.testing.assert_allclose(pool(hidden, mask, "mean", False), [[1.5, 4.0]])
    np.testing.assert_allclose(pool(hidden, mask, "cls", True), [[1.0, 0.0]])
    with pytest.raises(UserError, match="pooling='max'"):
        pool(hidden, mask, "max")


def _copy(tmp_path, change):
    tensors = load_file(GOLDEN / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "config.json", tmp_path / "config.json")
    return tmp_path


_QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda t: t.pop(_QUERY), "1.query.weight"),
        (lambda t: t.update({_QUERY: t[_QUERY][:8]}), _QUERY),
        (lambda t: t.update({"encoder.layer.2.output.dense.bias": np.zeros(16, np.float32)}), "layer.2"),
        (lambda t: t.update({"embeddings.extra": np.zeros(3, np.float32)}), "embeddings.extra"),
        (lambda t: t.update({f"bert.{_QUERY}": t[_QUERY]}), "twice"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tiny, tmp_path, change, complaint):
    with pytest.raises(UserError, match=complaint.replace(".", r"\.")):
        load_bert(_copy(tmp_path, change), tiny[0])


def test_prefixed_names_and_unused_heads_are_read(tiny, tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["cls.predictions.bias"] = np.zeros(50, np.float32)

    jax.tree.map(np.testing.assert_array_equal, load_bert(_copy(tmp_path, rename), tiny[0]), tiny[1])


@pytest.mark.parametrize(
    "fields, complaint",
    [({"model_type": "roberta"}, "roberta"), ({"hidden_act": "relu"}, "relu"), ({"hidden_size": None}, "hidden_size")],
)
def test_other_models_are_refused(tmp_path, fields, complaint):
    config = json.loads((GOLDEN / "config.json").read_text())
    config.update(fields)
    config = {k: v for k, v in config.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=complaint):
        BertConfig.from_file(tmp_path / "config.json")
    with pytest.raises(UserError, match="cannot be read"):
        BertConfig.from_file(tmp_path / "none.json")
