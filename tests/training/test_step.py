"""One step on stored trajectories: its gradient against a plain reference of the whole method, its metrics by hand."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored

from cipo_jax.learning.advantages import AdvantageConfig
from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.policy import Learner
from cipo_jax.training.step import Method, Stepper

CLIP, KL = 0.2, 0.05
GOLD, MALFORMED = (0, 3, 4), (2, 4, 5, 6)  # rows that answer right; rows without an answer or with an unparsable action
METHOD = Method(
    objective=ClippedObjective(clip_low=CLIP, clip_high=CLIP, kl_weight=KL),
    optimizer=stored.gradient_optimizer,
    questions=stored.GROUPS,
    samples=stored.SAMPLES,
    minibatches=1,
    microbatches=2,
)


@pytest.fixture(scope="module")
def setting():
    """The policy, its reference, and stored trajectories whose behaviour policy differs from both."""
    policy, task = stored.build_policy(), stored.build_task()
    params = stored.build_params(policy, 0)
    apart = stored.build_params(policy, 1)
    reference = jax.tree.map(lambda a, b: 0.98 * a + 0.02 * b, params, apart)
    trajectories = stored.stored_trajectories(task)
    logits = jax.jit(stored.plain_logits, static_argnums=0)

    def logprobs(params, mask=None):
        full = logits(policy.graph, params, trajectories.tokens, stored.causal(trajectories) if mask is None else mask)
        lp = np.asarray(stored.plain_logprobs(full, trajectories.tokens))
        return np.where(trajectories.action_mask, lp, 0), np.asarray(full)

    noise = np.random.default_rng(0).normal(0, 0.2, trajectories.tokens.shape)
    visible, full = logprobs(params)
    trajectories.behaviour_logprob[:] = np.where(trajectories.action_mask, visible + noise, 0)
    return SimpleNamespace(
        policy=policy, task=task, params=params, reference=reference, trajectories=trajectories, logprobs=logprobs,
        visible=visible, logits=full, ref=logprobs(reference)[0],
    )  # fmt: skip


def plain_update(s, advantage, mask):
    """Loss, gradient and metrics of the clipped objective, written out."""
    t, tokens = s.trajectories, jnp.asarray(s.trajectories.tokens)

    def loss_fn(params):
        logits = stored.plain_logits(s.policy.graph, params, tokens, stored.causal(t))
        lp = stored.plain_logprobs(logits, tokens)
        ratio = jnp.exp(jnp.where(mask, lp - t.behaviour_logprob, 0.0))
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        gap = jnp.where(mask, s.ref - lp, 0.0)
        k3 = jnp.exp(gap) - gap - 1
        return jnp.where(mask, KL * k3 - surrogate, 0.0).sum() / mask.sum(), (ratio, k3)

    (loss, (ratio, k3)), gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(s.params)
    p = jax.nn.softmax(s.logits)
    entropy = np.pad(np.asarray(-(p * jnp.log(p)).sum(-1)), ((0, 0), (1, 0)))
    ratio, k3 = np.asarray(ratio), np.asarray(k3)
    assert 0.01 < k3.max() < 10  # below the cap
    clipped = np.where(advantage > 0, ratio > 1 + CLIP, (ratio < 1 - CLIP) & (advantage < 0))
    return stored.by_path(gradient), {
        "loss": float(loss),
        "kl_k3": k3[mask].mean(),
        "entropy": entropy[mask].mean(),
        "ratio": ratio[mask].mean(),
        "clip_fraction": clipped[mask].mean(),
        "loss_count": mask.sum(),
    }


def assert_gradients_agree(gradient, expected, tolerance):
    scale = stored.norm(expected.values())
    assert gradient.keys() == expected.keys() and scale > 0.01
    for name, value in expected.items():
        assert stored.norm([gradient[name] - value]) <= tolerance * scale, name


def test_gradient_of_an_update_equals_the_plain_objective(setting):
    s, t = setting, setting.trajectories
    learner = Learner(s.policy, METHOD.objective, stored.gradient_optimizer(), microbatches=2)
    mask = t.action_mask.copy()
    mask[1] = False  # a row that is skipped
    advantage = np.where(t.action_mask, np.random.default_rng(1).normal(size=mask.shape), 0).astype(np.float32)
    batch = UpdateBatch(t.tokens, mask, t.turn, t.length, t.group, advantage, t.behaviour_logprob, s.ref)
    state, metrics = learner.update(learner.init(s.params), batch, 0)
    expected, values = plain_update(s, advantage, mask)
    assert_gradients_agree(stored.read_gradient(s.params, state.params), expected, 1e-5)
    assert 0.1 < values["clip_fraction"] < 0.4  # both sides of the clip are taken
    for name, value in values.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics["grad_norm"], stored.norm(expected.values()), rtol=1e-5)


@pytest.fixture(scope="module")
def stepper(setting):
    """A stepper that finds the stored trajectories where it would sample."""
    s = setting
    stepper = Stepper(METHOD, s.policy, s.task, RolloutConfig(observation_tokens=stored.OBSERVATION_TOKENS), seed=0)
    stepper.rollout = lambda *_: (s.policy.rules.put_batch(s.trajectories), {"decode_steps": jnp.int32(7)})
    return stepper


def plain_ealr(s):
    """EALR by action: nats per token that the observation just before it is worth, one dense forward per turn."""
    t = s.trajectories
    value, valid = np.zeros(t.action_span.shape[:2]), np.zeros(t.action_span.shape[:2], bool)
    for turn in range(stored.TURNS - 1):
        mask = stored.causal(t).copy()
        for b, (start, end) in enumerate(t.content_span[:, turn]):
            mask[b, end:, start:end] = False
        hidden = s.logprobs(s.params, mask)[0]
        for b, (start, end) in enumerate(t.action_span[:, turn + 1]):
            if end > start and t.content_span[b, turn, 1] > 0:
                value[b, turn + 1] = (s.visible - hidden)[b, start:end].mean()
                valid[b, turn + 1] = True
    return value, valid


def plain_advantages(s, use_ealr):
    """Advantages of every token as methods.md, section 1, has them."""
    t = s.trajectories
    value, valid = plain_ealr(s)
    value[list(MALFORMED)] = 0  # the gate; they stay in mean and std
    outcome = np.zeros(len(t))
    outcome[list(GOLD)] = 1
    reward = np.zeros(value.shape)
    for rows in np.arange(len(t)).reshape(stored.GROUPS, stored.SAMPLES):
        for turn in range(stored.TURNS):
            here = rows[valid[rows, turn]]
            if use_ealr and len(here) > 1:
                reward[here, turn] = (value[here, turn] - value[here, turn].mean()) / (value[here, turn].std() + 0.1)
        last = (t.action_span[rows, :, 1] > 0).sum(1) - 1
        reward[rows, last] += (outcome[rows] - outcome[rows].mean()) / (outcome[rows].std() + 1e-6)
    returns = reward[:, ::-1].cumsum(1)[:, ::-1]
    spread = np.take_along_axis(returns, np.maximum(t.turn, 0).astype(int), 1)
    return np.where(t.action_mask, spread, 0).astype(np.float32), value, valid


@pytest.fixture(scope="module")
def step(setting, stepper):
    state, record = stepper(stepper.learner.init(setting.params), setting.reference, setting.task.train, 0)
    return state, record.metrics()


def test_gradient_of_a_whole_step_equals_the_plain_method(setting, step):
    state, metrics = step
    advantage, _, _ = plain_advantages(setting, use_ealr=True)
    expected, values = plain_update(setting, advantage, setting.trajectories.action_mask)
    assert_gradients_agree(stored.read_gradient(setting.params, state.params), expected, 1e-4)
    for name, value in values.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(metrics["grad_norm"], stored.norm(expected.values()), rtol=1e-4)


def test_metrics_by_hand(setting, step):
    t, (_, metrics) = setting.trajectories, step
    rows = stored.GROUPS * stored.SAMPLES
    value, valid = plain_ealr(setting)
    assert valid.sum() == 14
    response = t.action_mask.sum()
    wanted = {
        "reward": 3 / rows,
        "em": 3 / rows,
        "f1": 3 / rows,
        "searches": 14 / rows,
        "response_tokens": response / rows,
        "total_tokens": t.length.sum() / rows,
        "length_clip_ratio": 1 / rows,
        "no_valid_answer_ratio": 3 / rows,
        "aborted_ratio": 3 / rows,
        "natural_termination_ratio": 10 / rows,
        "group_reward_variance": (1 / 4 + 3 / 16 + 0) / 3,
        "zero_variance_groups": 1,
        "zero_variance_share": 1 / 3,
        "skipped_groups": 0,  # equal outcomes still teach
        "ealr": value[valid].mean(),
        "ealr_std": value[valid].std(),
        "ealr_gated": valid[list(MALFORMED)].sum() / valid.sum(),
        "trajectories": rows,
        "sampled_tokens": response,
        "decode_steps": 7,
        "skipped_updates": 0,
        "empty_updates": 0,
        "sampler_gap_mean": np.abs(setting.visible - t.behaviour_logprob)[t.action_mask].mean(),
        "learning_rate": 1024,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    # Every quantity that methods.md, section 2, wants logged has a name here.
    assert {"grad_norm", "entropy", "kl_k1", "kl_k2", "kl_k3", "loss", "step_s", "tokens_per_s"} <= metrics.keys()
    assert all(isinstance(value, float | int) and np.isfinite(value) for value in metrics.values())


def test_outcome_alone_skips_the_group_of_equal_outcomes(setting, stepper):
    s = setting
    stepper.use(dataclasses.replace(METHOD, advantages=AdvantageConfig(ealr_weight=0.0)), s.task, 0)
    state, record = stepper(stepper.learner.init(s.params), s.reference, s.task.train, 0)
    stepper.use(METHOD, s.task, 0)
    metrics = record.metrics()
    assert metrics["skipped_groups"] == 1 and "ealr" not in metrics and record.token_ealr is None
    mask = s.trajectories.action_mask & (s.trajectories.group != 2)[:, None]
    advantage, _, _ = plain_advantages(s, use_ealr=False)
    expected, values = plain_update(s, advantage, mask)
    assert metrics["loss_count"] == mask.sum()
    np.testing.assert_allclose(metrics["loss"], values["loss"], rtol=1e-4)
    assert_gradients_agree(stored.read_gradient(s.params, state.params), expected, 1e-5)
