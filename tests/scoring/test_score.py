"""Packed counterfactual scoring equals one plain forward per turn with an explicit mask, or with the text deleted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.scoring.counterfactuals import Masked, RandomSpan, Removed
from cipo_jax.scoring.logprobs import token_logprobs
from cipo_jax.scoring.packing import pack
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Role, Trajectories

CONFIG = DecoderConfig(vocab_size=53, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=48)


@pytest.fixture(scope="module")
def policy():
    graph, params = init_decoder(CONFIG, 0, ShardingRules(mesh(devices=jax.devices()[:1])))
    return graph, jax.tree.map(lambda x: x * 1.5, params)  # sharper than at init: masking must matter


class DenseContext:
    """The obvious reference: softmax over one explicit mask."""

    def __init__(self, mask_BLL):
        self.mask = mask_BLL

    def attention(self, q, k, v, cache, layer):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        s = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(jnp.where(self.mask[:, None], s, -1e30), -1), v), cache


@jax.jit
def _plain(params, ids, positions, mask):
    model = nnx.merge(GRAPH[0], params)
    hidden, _ = model(ids[None], positions[None], DenseContext(mask[None]))
    logp = jax.nn.log_softmax(model.logits(hidden)[0])
    return jnp.pad(jnp.take_along_axis(logp[:-1], ids[1:, None], -1)[:, 0], (1, 0))


GRAPH = [None]
WIDTH = 96  # one padded width: the reference compiles once


def plain_logprobs(policy, ids, positions, mask):
    """Log-probs of ids[1:] at their own index, one row."""
    GRAPH[0] = policy[0]
    n = len(ids)
    full = np.eye(WIDTH, dtype=bool)
    full[:n, :n] = mask
    pad = (0, WIDTH - n)
    return np.asarray(_plain(policy[1], np.pad(ids, pad), np.pad(positions, pad).astype(np.int32), full))[:n]


def random_trajectories(rng, rows, turns, L=96, vocab=53):
    """Rows of prompt, then action / observation pairs with empty and length-1 actions among them."""
    out = {
        "tokens": np.zeros((rows, L), np.int32),
        "role": np.zeros((rows, L), np.int8),
        "turn": np.full((rows, L), -1, np.int8),
    }
    spans = {k: np.zeros((rows, turns + 1, 2), np.int32) for k in ("action", "evidence", "content")}
    length = np.zeros(rows, np.int32)
    for b in range(rows):
        at = int(rng.integers(2, 8))
        out["role"][b, :at] = Role.PROMPT
        n_turns = int(rng.integers(0, turns + 1))
        for t in range(n_turns + 1):
            n = int(rng.choice([0, 1, 3, 6])) if t else int(rng.integers(1, 5))
            spans["action"][b, t] = (at, at + n) if n else (0, 0)
            out["role"][b, at : at + n], out["turn"][b, at : at + n] = Role.ACTION, t
            at += n
            if t < n_turns:
                n, tags = int(rng.integers(1, 12)), int(rng.integers(0, 3))
                spans["evidence"][b, t] = at, at + n + 2 * tags
                spans["content"][b, t] = at + tags, at + tags + n
                n += 2 * tags
                out["role"][b, at : at + n], out["turn"][b, at : at + n] = Role.OBSERVATION, t
                at += n
        assert at <= L
        length[b] = at
        out["tokens"][b, :at] = rng.integers(0, vocab, at)
    none = np.zeros((rows, turns + 1, 1, 2), np.int32)
    return Trajectories(
        **out,
        behaviour_logprob=np.zeros((rows, L), np.float32),
        length=length,
        group=np.zeros(rows, np.int32),
        stop_reason=np.ones(rows, np.int32),
        action_span=spans["action"],
        evidence_span=spans["evidence"],
        content_span=spans["content"],
        passage_span=none,
        passage_row=none[..., 0],
    )


KINDS = [Masked(rows, span) for rows in ("post_evidence", "predictor", "action") for span in ("content", "block")]
KINDS += [Removed(), Removed("block"), RandomSpan()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, vars(k).values())))
@pytest.mark.parametrize("capacity", [200, 40])
def test_packed_equals_one_forward_per_copy(policy, kind, capacity):
    trajectories = random_trajectories(np.random.default_rng(5), rows=12, turns=3)
    copies = [kind.copies(trajectories, b) for b in range(12)]
    assert sum(map(len, copies)) > 8
    scorer = jax.jit(Scorer(policy[0], block=32).__call__)
    streams = pack(trajectories, copies, capacity)
    got, seen = None, None
    for stream in streams:
        visible, _, counterfactual = scorer(
            policy[1], trajectories.tokens, trajectories.length, trajectories.action_mask, copies=stream
        )
        hit = np.zeros(trajectories.tokens.shape, bool)
        for b, c in np.argwhere(stream.target >= 0):
            hit[b, stream.target[b, c]] = True
        got = np.where(hit, counterfactual, visible if got is None else got)
        seen = visible
    worst, moved = 0.0, 0.0
    for b, row in enumerate(copies):
        ids = trajectories.tokens[b, : trajectories.length[b]]
        causal = np.tril(np.ones((len(ids), len(ids)), bool))
        want = plain_logprobs(policy, ids, np.arange(len(ids)), causal)
        action = trajectories.action_mask[b, : len(ids)]
        np.testing.assert_allclose(np.asarray(seen)[b, : len(ids)][action], want[action], atol=2e-5)
        for copy in row:
            (h0, h1), (a0, a1) = copy.hidden, copy.scored
            if copy.contiguous:
                keep = [j for j in range(a1) if not h0 <= j < h1]
                values = plain_logprobs(
                    policy, ids[keep], np.arange(len(keep)), np.tril(np.ones((len(keep),) * 2, bool))
                )
                want[a0:a1] = values[a0 - (h1 - h0) :]
            elif copy.first == h1 == a0:  # nothing between the evidence and the action: deleted, with the gap kept
                keep = [j for j in range(a1) if not h0 <= j < h1]
                values = plain_logprobs(policy, ids[keep], np.asarray(keep), np.tril(np.ones((len(keep),) * 2, bool)))
                want[a0:a1] = values[a0 - (h1 - h0) :]
            else:
                mask = causal.copy()
                mask[max(copy.first, h1) :, h0:h1] = False
                values = plain_logprobs(policy, ids, np.arange(len(ids)), mask)
                want[a0:a1] = values[a0:a1]
            worst = max(worst, np.abs(got[b, a0:a1] - want[a0:a1]).max())
            moved = max(moved, np.abs(np.asarray(seen)[b, a0:a1] - want[a0:a1]).max())
    assert worst < 5e-5
    assert moved > 0.05  # hiding the span did something


def test_first_action_token_of_the_published_mask_is_exactly_unchanged(policy):
    trajectories = random_trajectories(np.random.default_rng(6), rows=6, turns=3)
    copies = [Masked("action", "block").copies(trajectories, b) for b in range(6)]
    visible, _, masked = jax.jit(Scorer(policy[0]).__call__)(
        policy[1], trajectories.tokens, trajectories.length, trajectories.action_mask,
        copies=pack(trajectories, copies, 200)[0],
    )  # fmt: skip
    firsts = [(b, c.scored[0]) for b, row in enumerate(copies) for c in row]
    assert firsts and all(float(visible[i]) == float(masked[i]) for i in firsts)


def test_padding_batch_order_and_capacity_change_nothing(policy):
    trajectories = random_trajectories(np.random.default_rng(7), rows=5, turns=2)
    kind, scorer = Masked(), jax.jit(Scorer(policy[0], block=64).__call__)

    def run(t, capacity):
        stream = pack(t, [kind.copies(t, b) for b in range(len(t))], capacity)[0]
        return [np.asarray(x) for x in scorer(policy[1], t.tokens, t.length, t.action_mask, copies=stream)]

    base = run(trajectories, 96)
    order = np.asarray([3, 0, 4, 1, 2])
    for a, b in zip(base, run(trajectories.map(lambda x: x[order]), 96)):
        np.testing.assert_allclose(a[order], b, atol=1e-5)
    wider = trajectories.map(lambda x: np.pad(x, ((0, 0), (0, 32))) if x.ndim == 2 and x.shape[1] == 96 else x)
    for a, b in zip(base, run(wider, 160)):
        np.testing.assert_allclose(a, b[:, :96], atol=1e-5)


def test_logprobs_and_gradients_equal_full_softmax():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(3, 17, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(29, 8)), jnp.float32)
    t = jnp.asarray(rng.integers(0, 29, (3, 17)), jnp.int32)
    active = jnp.asarray(rng.random((3, 17)) < 0.4)
    g, e = (jnp.asarray(rng.normal(size=(3, 17)), jnp.float32) for _ in range(2))

    def fast(h, w):
        logprob, entropy = token_logprobs(h, w, t, active, 0.7)
        return (logprob * g + entropy * e).sum()

    def slow(h, w):
        logp = jax.nn.log_softmax(h @ w.T / 0.7)
        logprob = jnp.take_along_axis(logp, t[..., None], -1)[..., 0]
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return jnp.where(active, logprob * g + entropy * e, 0).sum()

    import cipo_jax.scoring.logprobs as module

    for tokens in (6, 2048):
        module.TOKENS_PER_BLOCK, before = tokens, module.TOKENS_PER_BLOCK
        try:
            a, b = jax.value_and_grad(fast, (0, 1))(h, w), jax.value_and_grad(slow, (0, 1))(h, w)
        finally:
            module.TOKENS_PER_BLOCK = before
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4), a, b)
