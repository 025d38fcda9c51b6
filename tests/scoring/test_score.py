"""Log-probs in blocks equal a full softmax; EALR's expectation is the divergence that the paper says it is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_scoring

import cipo_jax.scoring.logprobs as module
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.scoring.counterfactuals import Masked
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.scoring.logprobs import token_logprobs
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Role, Trajectories


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

    for tokens in (6, 2048):
        module.TOKENS_PER_BLOCK, before = tokens, module.TOKENS_PER_BLOCK
        try:
            a, b = jax.value_and_grad(fast, (0, 1))(h, w), jax.value_and_grad(slow, (0, 1))(h, w)
        finally:
            module.TOKENS_PER_BLOCK = before
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-4), a, b)


@pytest.mark.parametrize("length", [1, 2])
def test_expectation_over_actions_is_the_kl_of_eq_7(length):
    """Every action of a 30-token vocabulary: sum of p(a | h, E) (l_vis - l_mask) = KL(visible || masked)."""
    vocab, prompt, evidence, bridge = 30, 4, 7, 2
    config = DecoderConfig(vocab_size=vocab, width=24, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=32)
    graph, params = init_decoder(config, 0, slow_scoring.one_device())
    params = jax.tree.map(lambda x: x * 2.0, params)
    rng = np.random.default_rng(0)
    context = rng.integers(0, vocab, prompt + 1 + evidence + bridge)
    actions = np.asarray(list(itertools.product(range(vocab), repeat=length)))
    B, start = len(actions), len(context)
    tokens = np.concatenate([np.broadcast_to(context, (B, start)), actions], 1).astype(np.int32)
    role, turn = np.full(tokens.shape, Role.OBSERVATION, np.int8), np.zeros(tokens.shape, np.int8)
    role[:, :prompt], turn[:, :prompt] = Role.PROMPT, -1
    role[:, prompt], role[:, start:], turn[:, start:] = Role.ACTION, Role.ACTION, 1
    action_span, content_span = np.zeros((2, B, 2, 2), np.int32)
    action_span[:] = [[prompt, prompt + 1], [start, start + length]]
    content_span[:, 0] = prompt + 1, prompt + 1 + evidence
    trajectories = Trajectories(
        tokens=tokens, role=role, turn=turn, behaviour_logprob=np.zeros(tokens.shape, np.float32),
        length=np.full(B, start + length, np.int32), group=np.zeros(B, np.int32), stop_reason=np.ones(B, np.int32),
        action_span=action_span, evidence_span=content_span, content_span=content_span,
        passage_span=content_span[:, :, None], passage_row=np.zeros((B, 2, 1), np.int32),
    )  # fmt: skip

    scorer = EvidenceScorer(Scorer(graph, block=32), Masked(), slow_scoring.one_device())
    visible, _, masked = (x[:, start:].astype(np.float64) for x in scorer(params, trajectories, trajectories).fetch())
    probability = np.exp(visible.sum(1))
    assert abs(probability.sum() - 1) < 1e-5
    expectation = (probability * (visible - masked).sum(1)).sum()

    def distributions(hide):
        """log p(a_1) `[V]`, and log p(a_2 | a_1) `[V, V]` where actions have two tokens, from one explicit mask."""
        n = tokens.shape[1]
        mask = np.tril(np.ones((n, n), bool))
        if hide:
            mask[prompt + 1 + evidence :, prompt + 1 : prompt + 1 + evidence] = False
        positions = np.broadcast_to(np.arange(n, dtype=np.int32), tokens.shape)
        logp = slow_scoring.plain_log_softmax(
            graph, params, tokens, positions, np.broadcast_to(mask, (B, n, n))
        )  # [B, n, V]
        logp = np.asarray(logp, np.float64)
        return logp[0, start - 1], logp[::vocab, start] if length == 2 else None

    (p, p_next), (q, q_next) = distributions(False), distributions(True)
    divergence = (np.exp(p) * (p - q)).sum()
    if length == 2:
        divergence += (np.exp(p) * (np.exp(p_next) * (p_next - q_next)).sum(1)).sum()
    assert divergence > 0.01
    assert abs(expectation - divergence) < 1e-5 * max(1, divergence)
