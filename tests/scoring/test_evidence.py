"""Packed counterfactual scoring equals one plain forward per turn and counterfactual, for softmax and hybrid decoders."""

import jax
import numpy as np
import pytest
import slow_scoring
from slow_scoring import WIDTH, one_device, plain_logprobs, random_trajectories, slow_rows

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.scoring.copies import masked_edges
from cipo_jax.scoring.counterfactuals import Masked, RandomSpan, Removed, Several, Window, transitions
from cipo_jax.scoring.evidence import EvidenceScorer, check
from cipo_jax.scoring.passages import OnlyPassages, Replaced, non_supportive_only, other_evidence, supportive_only
from cipo_jax.scoring.score import Scorer

ROWS, PLACES = 10, 320  # about three trajectories a row
SUPPORTIVE = np.random.default_rng(3).random((14, 4, 3)) < 0.4
KINDS = {
    "post_evidence": Masked(),
    "post_evidence_block": Masked(evidence_span="block"),
    "removed": Removed(),
    "removed_block": Removed("block"),
    "replaced": Replaced(passages=((7, 8, 9), (11,) * 40, (3, 1, 4, 1, 5))),
    "random_span": RandomSpan(),
    "supportive_only": supportive_only(),
    "non_supportive_only": non_supportive_only(contiguous=True),
    "without_second": OnlyPassages(1),
    "window_2": Window(2),
    "trajectory": Window(contiguous=True, evidence_span="block"),
    "unmasked": Masked(gdn_mask="unmasked"),
    "predictor": Masked("predictor", gdn_mask="unmasked"),
    "predictor_block": Masked("predictor", "block", gdn_mask="unmasked"),
    "action": Masked("action", gdn_mask="unmasked"),
    "action_block": Masked("action", "block", gdn_mask="unmasked"),
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    """With rounding out of the way, equal means equal; `tests/parity` has the float32 errors."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=slow_scoring.CONFIGS)
def case(request, float64):
    policy = slow_scoring.policy(request.param)
    scorer = EvidenceScorer(Scorer(policy[0], block=64), Masked(), one_device(), capacity=PLACES)
    return request.param, policy, scorer, random_trajectories(np.random.default_rng(5), rows=14)


def compare(effects, kind, policy, trajectories, supportive=SUPPORTIVE):
    """Largest error of `effects` (of one kind), and the largest effect that the slow definition finds."""
    plain = plain_logprobs(
        policy, [(t[:n], np.arange(n), None) for t, n in zip(trajectories.tokens, trajectories.length.tolist())]
    )
    slow = [(b, *case) for b in range(len(trajectories)) for case in slow_rows(kind, trajectories, b, supportive[b])]
    values = plain_logprobs(policy, [row for _, _, row, _ in slow])
    want = {}
    for (b, turn, _, where), value in zip(slow, values):
        for place, index in where.items():
            key = b, turn, int(trajectories.turn[b, place])
            want.setdefault(key, []).append(plain[b][place] - value[index])
    got = {(e.row, e.turn, e.action): e.difference for e in effects}
    assert got.keys() == want.keys() and len(want) > 12
    worst = max(np.abs(got[key] - np.asarray(want[key])).max() for key in want)
    return worst, max(np.abs(np.asarray(v)).max() for v in want.values())


@pytest.mark.parametrize("name", KINDS)
def test_packed_equals_one_forward_per_turn(case, name):
    _, policy, scorer, trajectories = case
    scorer.counterfactual = KINDS[name]
    scores = scorer.score_packed(policy[1], trajectories, PLACES, SUPPORTIVE, rows=ROWS)
    assert np.bincount(scores.rows.row).max() > 1  # several trajectories in a row
    worst, moved = compare(scores.effects(), KINDS[name], policy, trajectories)
    assert worst < 1e-9
    assert moved > 0.05  # hiding did something


def test_any_subset_in_one_pass_and_overflow_into_further_passes(case):
    _, policy, _, trajectories = case
    kinds = [Masked(), Removed(), KINDS["replaced"], supportive_only(), Window(2)]
    scorer = EvidenceScorer(Scorer(policy[0], block=64), Several(kinds), one_device(), capacity=192)
    scores = scorer.score_packed(policy[1], trajectories, PLACES, SUPPORTIVE, rows=ROWS)
    assert len(scores.passes) > 1
    effects = list(scores.effects())
    assert {e.kind for e in effects} == {k.name for k in kinds}
    for kind in kinds:
        worst, _ = compare([e for e in effects if e.kind == kind.name], kind, policy, trajectories)
        assert worst < 1e-9
    with pytest.raises(UserError, match="more than once"):
        scores.fetch()


def test_layout_changes_nothing(case):
    """One a row, several a row, another batch order, more padding, another capacity: the same numbers."""
    _, policy, scorer, trajectories = case
    scorer.counterfactual = Masked()

    def packed(t):
        return scorer.score_packed(policy[1], t, PLACES, rows=ROWS).fetch()

    def alone(t, **more):
        own = EvidenceScorer(Scorer(policy[0], block=64), Masked(), one_device(), **more)
        return own(policy[1], t, t).fetch()

    base = packed(trajectories)
    assert np.abs(base[0] - base[2]).max() > 0.05
    order = np.random.default_rng(0).permutation(len(trajectories))
    for a, b in zip(base, packed(trajectories.map(lambda x: x[order]))):
        np.testing.assert_allclose(a[order], b, atol=1e-9)
    wider = trajectories.map(lambda x: np.pad(x, ((0, 0), (0, 32))) if x.shape[1:] == (WIDTH,) else x)
    for a, b in zip(base, alone(wider, capacity=64)):
        np.testing.assert_allclose(a, b[:, :WIDTH], atol=1e-9)


def test_no_gradient_flows(case):
    _, policy, scorer, trajectories = case
    scorer.counterfactual = Masked()
    scores = scorer.score_packed(policy[1], trajectories, PLACES, rows=ROWS)
    rows, stream = scores.rows, scores.packed.streams[0]

    def total(params):
        out = scorer._program(params, rows.tokens, rows.length, rows.active, np.float32(1), stream, rows.start)
        return sum(x.sum() for x in out)

    grads = jax.jit(jax.grad(total))(policy[1])
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))


class HidesNothing:
    """Copies of everything behind the evidence that hide an empty block."""

    name = "nothing"

    def copies(self, trajectories, row, supportive_TK=None):
        return [
            masked_edges(self.name, turn, trajectories, row, (e1, e1), e1, (a0, a1))
            for turn, _, e1, a0, a1 in transitions(trajectories, row, "content")
        ]


def test_masked_equals_visible_when_the_block_has_no_keys_to_see(case):
    _, policy, scorer, trajectories = case
    scorer.counterfactual = HidesNothing()
    scores = scorer.score_packed(policy[1], trajectories, PLACES, rows=ROWS)
    visible, _, hidden = scores.fetch()
    assert sum(len(copy) for copy in scores.copies) > 30
    np.testing.assert_allclose(hidden, visible, atol=1e-9)
    # Observations without a passage: no copy is made, and the two are the same array.
    scorer.counterfactual = Masked()
    none = np.zeros_like(trajectories.content_span)
    empty = trajectories.map(lambda x: none if x is trajectories.content_span else x)
    scores = scorer.score_packed(policy[1], empty, PLACES, rows=ROWS)
    visible, _, hidden = scores.fetch()
    assert not list(scores.effects()) and np.array_equal(visible, hidden) and visible.any()


def test_first_action_token_of_the_published_mask_is_exactly_unchanged(case):
    _, policy, scorer, trajectories = case
    scorer.counterfactual = Masked("action", "block", gdn_mask="unmasked")
    effects = list(scorer.score_packed(policy[1], trajectories, PLACES, rows=ROWS).effects())
    assert effects and all(e.difference[0] == 0.0 for e in effects)
    assert max(np.abs(e.difference).max() for e in effects) > 0.05


def test_a_mask_on_edges_alone_is_refused_for_delta_layers():
    check(Masked("action"), slow_scoring.SOFTMAX)
    check(Several([Masked(), Masked("action", gdn_mask="unmasked", name="literal")]), slow_scoring.HYBRID)
    with pytest.raises(UserError, match="gdn_mask='unmasked'"):
        check(Several([Removed(), Masked("action")]), slow_scoring.HYBRID)


def test_wrong_options_are_refused():
    for make, match in (
        (lambda: Masked("rows"), "mask_rows='rows'"),
        (lambda: Masked(evidence_span="all"), "evidence_span='all'"),
        (lambda: Window(0), "actions=0"),
        (lambda: Several([Masked(), Masked("action")]), "named 'masked'"),
        (lambda: Replaced(passages=()), "no text"),
        (lambda: OnlyPassages("good"), "keep='good'"),
        (lambda: supportive_only().copies(random_trajectories(np.random.default_rng(5), 1), 0), "pass supportive"),
    ):
        with pytest.raises(UserError, match=match):
            make()


def test_evidence_of_other_groups_replaces_when_no_text_is_given():
    trajectories = random_trajectories(np.random.default_rng(5), rows=14)
    copies = [(b, c) for b in range(14) for c in Replaced().copies(trajectories, b)]
    assert len(copies) == sum(len(Masked().copies(trajectories, b)) for b in range(14))
    for b, copy in copies:
        e0, e1 = trajectories.content_span[b, copy.turn]
        text = copy.token[: e1 - e0].tolist()
        pool = [np.resize(t, e1 - e0).tolist() for t in other_evidence(trajectories, b)]
        assert copy.limit == e0 and text in pool
    only = trajectories.map(lambda x: x[:2])  # one group
    assert not Replaced().copies(only, 0) and not Replaced().copies(only, 1)


def test_eight_devices_compute_what_one_does(case):
    name, policy, scorer, trajectories = case
    kinds = Several([Masked(), Removed(), Window(2)])
    scorer.counterfactual = kinds
    want = {(e.kind, e.row, e.turn, e.action): e.difference
            for e in scorer.score_packed(policy[1], trajectories, PLACES, rows=ROWS).effects()}  # fmt: skip
    rules = ShardingRules(mesh(replica=2, fsdp=2, tensor=2))
    graph, shapes = abstract_decoder(slow_scoring.CONFIGS[name], rules)
    params = jax.device_put(policy[1], parameter_shardings(shapes, rules))
    sharded = EvidenceScorer(Scorer(graph, block=64), kinds, rules, capacity=PLACES)
    got = list(sharded.score_packed(params, trajectories, PLACES, rows=ROWS).effects())
    assert len(got) == len(want)
    for e in got:
        np.testing.assert_allclose(e.difference, want[e.kind, e.row, e.turn, e.action], atol=1e-9)
