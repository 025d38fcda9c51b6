"""Four simulated devices (fsdp 2 x tensor 2) train and score fixed trajectories as one device does."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import stored

from cipo_jax.learning.batch import UpdateBatch
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.learning.state import adamw
from cipo_jax.scoring.counterfactuals import Masked
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.training.policy import Learner

MESHES = {"one": (1, 1), "four": (2, 2)}
UPDATES = 3


@pytest.fixture(scope="module")
def scored():
    """The stored trajectories, and by mesh the policy, its parameters and the scores of the trajectories."""
    trajectories = stored.stored_trajectories(stored.build_task())
    out = {}
    for name, (fsdp, tensor) in MESHES.items():
        policy = stored.build_policy(fsdp, tensor)
        params = stored.build_params(policy, 0)
        scorer = EvidenceScorer(policy.scorer, Masked(), policy.rules)
        scores = scorer(params, policy.rules.put_batch(trajectories), trajectories).fetch()
        out[name] = SimpleNamespace(policy=policy, params=params, scores=scores)
    return trajectories, out


def test_scores_agree(scored):
    trajectories, by_mesh = scored
    one, four = by_mesh["one"].scores, by_mesh["four"].scores
    difference = np.abs(one[0] - one[2])[trajectories.action_mask]
    assert difference.max() > 0.05  # something was hidden
    for name, a, b in zip(("visible", "entropy", "counterfactual"), one, four):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def trained(scored):
    """By mesh, metrics of three updates on the same minibatches, and the parameters before and after."""
    t, by_mesh = scored
    visible = by_mesh["one"].scores[0]
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.15, visible.shape).astype(np.float32)
    batches = []
    for _ in range(UPDATES):
        advantage = np.where(t.action_mask, rng.normal(size=(len(t), 1)), 0).astype(np.float32)
        batches.append(
            UpdateBatch(
                t.tokens, t.action_mask, t.turn, t.length, t.group, advantage, visible + noise, visible - noise / 2
            )
        )
    out = {}
    for name, place in by_mesh.items():
        objective = ClippedObjective(kl_weight=0.02)
        learner = Learner(place.policy, objective, adamw(learning_rate=1e-3, b2=0.98), microbatches=2)
        state, metrics = learner.init(place.params), []
        for number, batch in enumerate(batches):
            state, told = learner.update(state, batch, number)
            metrics.append(jax.device_get(told))
        out[name] = SimpleNamespace(before=place.params, state=state, metrics=metrics)
    return out


def test_gradient_norms_agree(trained):
    one, four = trained["one"].metrics[0], trained["four"].metrics[0]
    assert one["grad_norm"] > 0.01 and one["skipped"] == four["skipped"] == 0
    assert abs(four["grad_norm"] - one["grad_norm"]) <= 1e-5 * one["grad_norm"]
    for name in ("loss", "kl_k3", "entropy", "clip_fraction"):
        np.testing.assert_allclose(four[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_parameters_agree_after_three_updates(trained):
    change = {}
    for name, place in trained.items():
        after, before = stored.by_path(jax.device_get(place.state.params)), stored.by_path(jax.device_get(place.before))
        change[name] = {path: after[path].astype(np.float64) - before[path] for path in before}
    size = stored.norm(change["one"].values())
    assert size > 0
    assert stored.norm([change["four"][path] - x for path, x in change["one"].items()]) <= 1e-3 * size


def test_replicas_are_equal_bit_for_bit_and_matrices_are_split(trained):
    split = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained["four"].state):
        pieces = {}
        for shard in leaf.addressable_shards:
            kept = pieces.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(kept, np.asarray(shard.data), err_msg=jax.tree_util.keystr(path))
        split += len(pieces) == 4
    assert split >= 3 * 8  # seven matrices of a layer and the embedding, with both moments
