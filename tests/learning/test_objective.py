"""Objectives: hand-computed values and gradients, and a loop over rows and tokens for every aggregation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cipo_jax.errors import UserError
from cipo_jax.learning.aggregation import AGGREGATIONS, token_weights
from cipo_jax.learning.batch import UpdateBatch, truncated_importance, update_batch
from cipo_jax.learning.gspo import GspoObjective
from cipo_jax.learning.kl import kl_estimate
from cipo_jax.learning.objective import ClippedObjective, SupervisedObjective
from cipo_jax.types import Role, StopReason, Trajectories


def rows(mask, advantage=0.0, old=0.0, ref=None, importance=None):
    mask = np.asarray(mask, bool)
    full = lambda x: np.broadcast_to(np.asarray(x, np.float32), mask.shape)  # noqa: E731
    return UpdateBatch(
        tokens=np.zeros(mask.shape, np.int32),
        action_mask=mask,
        turn=np.zeros(mask.shape, np.int8),
        length=np.full(len(mask), mask.shape[1], np.int32),
        group=np.arange(len(mask), dtype=np.int32),
        advantage=full(advantage),
        old_logprob=None if old is None else full(old),
        ref_logprob=None if ref is None else full(ref),
        importance=None if importance is None else full(importance),
    )


def mean(pair):
    return float(pair[0] / pair[1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # slope: d loss / d logprob = -ratio A where the clip is off, else 0
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # clipped at 1.3
        (0.5, 2.0, -1.0, -1.0),  # pessimistic: no clip below for a positive advantage
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_clip_golden(ratio, advantage, loss, slope):
    objective = ClippedObjective(clip_low=0.2, clip_high=0.3, kl_weight=0.0)
    batch = rows([[True]], advantage)
    (value, metrics), grad = jax.value_and_grad(objective, has_aux=True)(jnp.array([[math.log(ratio)]]), batch)
    assert float(value) == pytest.approx(loss, rel=1e-6)
    assert float(grad[0, 0]) == pytest.approx(slope, rel=1e-6)
    assert mean(metrics["clip_fraction"]) == float(slope == 0.0)
    assert mean(metrics["ratio"]) == pytest.approx(ratio, rel=1e-6)


def test_kl_golden():
    """p / ref = 2: k1 = ln 2, k2 = ln(2)^2 / 2, k3 = 1/2 - 1 + ln 2; slopes 1, ln 2, 1 - 1/2."""
    d = math.log(2.0)
    for name, value, slope in (("k1", d, 1.0), ("k2", d * d / 2, d), ("k3", 0.5 - 1 + d, 0.5)):
        got, grad = jax.value_and_grad(kl_estimate)(d - 1.0, -1.0, name)
        assert float(got) == pytest.approx(value, rel=1e-5)
        assert float(grad) == pytest.approx(slope, rel=1e-5)


def test_k3_cap_and_overflow():
    assert float(kl_estimate(-5.0, 0.0, "k3", 10.0)) == 10.0
    assert float(kl_estimate(-5.0, 0.0, "k3")) == pytest.approx(math.exp(5) - 6, rel=1e-5)
    assert np.isfinite(kl_estimate(-500.0, 0.0, "k3"))


def test_k1_and_k3_estimate_the_kl_and_k2_has_its_gradient():
    """Exact expectations over a vocabulary, by automatic differentiation of the closed form."""
    logits, ref = jnp.array([0.3, -1.0, 0.9]), jax.nn.log_softmax(jnp.array([0.0, 0.5, -0.5]))

    def kl(x):
        logp = jax.nn.log_softmax(x)
        return (jnp.exp(logp) * (logp - ref)).sum()

    p = jax.nn.softmax(logits)
    for name in ("k1", "k3"):
        assert float((p * kl_estimate(jnp.log(p), ref, name)).sum()) == pytest.approx(float(kl(logits)), rel=1e-5)
    # The expected gradient on policy: samples are held fixed while the estimate is differentiated.
    k2_gradient = jax.grad(lambda x: (p * kl_estimate(jax.nn.log_softmax(x), ref, "k2")).sum())(logits)
    np.testing.assert_allclose(k2_gradient, jax.grad(kl)(logits), atol=1e-6)
    k1_gradient = jax.grad(lambda x: (p * kl_estimate(jax.nn.log_softmax(x), ref, "k1")).sum())(logits)
    np.testing.assert_allclose(k1_gradient, np.zeros(3), atol=1e-6)


def loop_reference(objective, logprob, batch, entropy=None, sequence_ratio=False):
    """(sum, count) with Python floats, one row and token at a time."""
    sums, tokens, live_rows = 0.0, 0, 0
    for i in range(len(batch.tokens)):
        where = [j for j in range(batch.tokens.shape[1]) if batch.action_mask[i, j]]
        row = []
        for j in where:
            log_ratio = float(logprob[i, j] - batch.old_logprob[i, j])
            if sequence_ratio:
                log_ratio = sum(float(logprob[i, k] - batch.old_logprob[i, k]) for k in where) / len(where)
            ratio, a = math.exp(log_ratio), float(batch.advantage[i, j])
            clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
            loss = -min(ratio * a, clipped * a)
            if batch.importance is not None:
                loss *= float(batch.importance[i, j])
            d = float(logprob[i, j] - batch.ref_logprob[i, j])
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[objective.kl_estimator]
            row.append(loss + objective.kl_weight * kl)
            if entropy is not None:
                row[-1] -= objective.entropy_weight * float(entropy[i, j])
        tokens, live_rows = tokens + len(where), live_rows + bool(where)
        if objective.aggregation == "seq_mean_token_mean":
            sums += sum(row) / max(len(where), 1)
        elif objective.aggregation == "seq_mean_token_sum_norm":
            sums += sum(row) / objective.token_norm
        else:
            sums += sum(row)
    return sums, float(tokens if objective.aggregation == "token_mean" else live_rows)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["k1", "k2", "k3"]),
    st.booleans(),
    st.sampled_from([ClippedObjective, GspoObjective]),
)
def test_against_the_loop(seed, aggregation, kl_estimator, weighted, kind):
    rng = np.random.default_rng(seed)
    shape = (4, 7)
    mask = rng.random(shape) < 0.5
    mask[0] = False
    logprob, old, ref = -rng.random((3, *shape)).astype(np.float32)
    importance = rng.random(shape) if weighted else None
    batch = rows(mask, rng.normal(size=shape), old, ref, importance)
    entropy = rng.random(shape).astype(np.float32)
    objective = kind(
        kl_estimator=kl_estimator, kl_weight=0.5, aggregation=aggregation, token_norm=11.0, entropy_weight=0.1
    )
    loss, metrics = objective(logprob, batch, entropy)
    expected = loop_reference(objective, logprob, batch, entropy, sequence_ratio=kind is GspoObjective)
    assert float(loss) == pytest.approx(expected[0], abs=1e-4)
    assert float(metrics["loss"][0]) == float(loss)
    assert float(metrics["loss"][1]) == expected[1]
    assert float(metrics["entropy"][0]) == pytest.approx(float(entropy[mask].sum()), rel=1e-5)
    d = (logprob - ref)[mask]
    for name, value in (("k1", d), ("k2", d * d / 2), ("k3", np.exp(-d) - 1 + d)):
        assert float(metrics[f"kl_{name}"][0]) == pytest.approx(float(value.sum()), abs=1e-4)
        assert float(metrics[f"kl_{name}"][1]) == mask.sum()


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [(ClippedObjective, name) for name in AGGREGATIONS] + [(GspoObjective, "seq_mean_token_mean")],
)
def test_sums_and_counts_add_up_over_rows(kind, aggregation):
    rng = np.random.default_rng(3)
    shape = (6, 5)
    mask = rng.random(shape) < 0.6
    logprob, old, ref = -rng.random((3, *shape)).astype(np.float32)
    batch = rows(mask, rng.normal(size=shape), old, ref)
    objective = kind(aggregation=aggregation, token_norm=9.0)
    whole = objective(logprob, batch)[1]
    parts = [objective(logprob[i : i + 2], batch.map(lambda x, i=i: x[i : i + 2]))[1] for i in (0, 2, 4)]
    for name, metric in whole.items():
        if isinstance(metric, tuple):
            for k in range(2):
                np.testing.assert_allclose(sum(float(p[name][k]) for p in parts), metric[k], rtol=1e-5, atol=1e-6)
        else:
            assert float(metric) == max(float(p[name]) for p in parts)


@pytest.mark.parametrize("kind", [ClippedObjective, GspoObjective, SupervisedObjective])
def test_off_action_tokens_reach_nothing(kind):
    """Observation and padding tokens hold NaN and inf everywhere; loss, metrics and gradient are those without them."""
    mask = np.array([[True, False, True, False]])
    clean = rows(mask, 1.5, -1.0, -1.2)
    logprob, entropy = np.full((1, 4), -0.9, np.float32), np.full((1, 4), 0.3, np.float32)

    def spoil(x, value):
        return np.where(mask, x, np.float32(value))

    dirty = rows(mask, spoil(clean.advantage, np.nan), spoil(clean.old_logprob, -np.inf), spoil(-1.2, 1e30))
    objective = kind()
    grad_fn = jax.value_and_grad(objective, has_aux=True)
    (loss, metrics), grad = grad_fn(logprob, clean, entropy)
    (dirty_loss, dirty_metrics), dirty_grad = grad_fn(spoil(logprob, np.nan), dirty, spoil(entropy, np.inf))
    assert float(loss) == float(dirty_loss) != 0.0
    jax.tree.map(np.testing.assert_array_equal, metrics, dirty_metrics)
    np.testing.assert_array_equal(grad, dirty_grad)
    assert not np.asarray(grad)[~mask].any() and np.asarray(grad)[mask].all()


@pytest.mark.parametrize("spoilt", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("kind", [ClippedObjective, GspoObjective])
def test_a_bad_old_logprob_reaches_the_loss(spoilt, kind):
    old = np.array([[-1.0, spoilt]])
    loss, _ = kind(kl_weight=0.0)(jnp.array([[-1.0, -1.0]]), rows([[True, True]], -1.0, old))
    assert np.isnan(float(loss))


def test_zero_advantages_give_an_exactly_zero_policy_gradient():
    logprob = jnp.array([[-1.0, -2.0, -0.5]])
    batch = rows([[True, True, True]], 0.0, -1.3)
    assert not np.asarray(jax.grad(lambda x: ClippedObjective(kl_weight=0.0)(x, batch)[0])(logprob)).any()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce():
    logprob = jnp.array([[-1.0, -2.0]])
    batch = rows([[True, True]], [[3.0, -2.0]], old=None)
    for objective in (ClippedObjective(kl_weight=0.0), GspoObjective(kl_weight=0.0, aggregation="token_mean")):
        grad, metrics = jax.grad(objective, has_aux=True)(logprob, batch)
        np.testing.assert_allclose(grad, [[-3.0, 2.0]], rtol=1e-6)
        assert mean(metrics["ratio"]) == 1.0


def test_gspo_clips_the_whole_sequence_and_keeps_each_tokens_gradient():
    """Row 0 has ratio exp(.5) and is clipped for positive advantages; row 1 has ratio 1 although its tokens differ."""
    logprob = jnp.array([[0.5, 0.5, 9.0], [1.0, -1.0, 9.0]])
    batch = rows([[True, True, False]] * 2, [[1.0, -1.0, 0.0], [1.0, 2.0, 0.0]])
    objective = GspoObjective(kl_weight=0.0, aggregation="token_mean")
    grad, metrics = jax.grad(objective, has_aux=True)(logprob, batch)
    np.testing.assert_allclose(grad, [[0.0, math.exp(0.5), 0.0], [-1.0, -2.0, 0.0]], rtol=1e-6)
    assert mean(metrics["clip_fraction"]) == 0.25


def test_token_weights_golden():
    mask = jnp.array([[True, True, False], [False, False, False], [False, True, False]])
    for aggregation, first, count in (
        ("token_mean", 1.0, 3.0),
        ("seq_mean_token_sum", 1.0, 2.0),
        ("seq_mean_token_mean", 0.5, 2.0),
        ("seq_mean_token_sum_norm", 0.1, 2.0),
    ):
        weight, got = token_weights(mask, aggregation, 10.0)
        third = 0.1 if aggregation.endswith("norm") else 1.0
        np.testing.assert_allclose(weight, [[first, first, 0], [0, 0, 0], [0, third, 0]])
        assert float(got) == count


def test_supervised_golden():
    loss, metrics = SupervisedObjective()(jnp.array([[0.0, -1.0, -3.0, -7.0]]), rows([[False, True, True, False]]))
    assert float(loss) == 4.0 and mean(metrics["loss"]) == 2.0 and mean(metrics["nll"]) == 2.0


def test_update_batch_skips_zero_groups_and_overlong_rows():
    role = np.array([[Role.PROMPT, Role.ACTION, Role.OBSERVATION, Role.ACTION]] * 4, np.int8)
    span = np.zeros((4, 2, 2), np.int32)
    trajectories = Trajectories(
        tokens=np.zeros((4, 4), np.int32),
        role=role,
        turn=np.array([[-1, 0, 0, 1]] * 4, np.int8),
        behaviour_logprob=np.zeros((4, 4), np.float32),
        length=np.full(4, 4, np.int32),
        group=np.array([7, 7, 9, 9], np.int32),
        stop_reason=np.array([StopReason.ANSWER, StopReason.TOKEN_LIMIT, StopReason.ANSWER, StopReason.ANSWER]),
        action_span=span,
        evidence_span=span,
        content_span=span,
        passage_span=span[:, :, None],
        passage_row=span[:, :, :1],
    )
    advantage = np.zeros((4, 4), np.float32)
    advantage[0, 1] = 1.0
    kept = [False, True, False, True]
    none = [False] * 4
    got = update_batch(trajectories, advantage)
    np.testing.assert_array_equal(got.action_mask, [kept, kept, none, none])
    got = update_batch(trajectories, advantage, mask_overlong=True)
    np.testing.assert_array_equal(got.action_mask, [kept, none, none, none])
    got = update_batch(trajectories, advantage, skip_zero_groups=False)
    np.testing.assert_array_equal(got.action_mask, [kept] * 4)


def test_truncated_importance_golden():
    mask = np.array([[True, True, True, False]])
    old = np.log(np.array([[0.5, 0.9, 0.1, 0.5]]))
    behaviour = np.log(np.array([[0.5, 0.1, 0.2, 1e-9]]))
    np.testing.assert_allclose(truncated_importance(old, behaviour, mask, 2.0), [[1.0, 2.0, 0.5, 1.0]], rtol=1e-6)
    assert np.isnan(truncated_importance(old, behaviour * np.nan, mask, 2.0)[0, :3]).all()


def test_bad_options_are_refused():
    for options in (
        {"aggregation": "mean"},
        {"aggregation": "seq_mean_token_sum_norm"},
        {"kl_estimator": "k4"},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
    ):
        with pytest.raises(UserError):
            ClippedObjective(**options)
    with pytest.raises(UserError, match="kl_weight"):
        ClippedObjective(kl_weight=1e-3)(jnp.zeros((1, 1)), rows([[True]]))
    with pytest.raises(UserError, match="entropy_weight"):
        ClippedObjective(kl_weight=0.0, entropy_weight=0.1)(jnp.zeros((1, 1)), rows([[True]]))
