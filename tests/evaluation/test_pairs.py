"""Scripted pairs are scored in batches of one shape, and the share counts the right side."""

import numpy as np

from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.evaluation.pairs import padded, preference
from cipo_jax.evaluation.scripted import demonstration_trajectories, evidence_pairs
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.types import Role

TASK = SyntheticTask(seed=3, validation_questions=12, rl_worlds=1, warm_start_worlds=1)
PROTOCOL = SearchR1(build_tokenizer(), instruction="Question: {question}\n")


def setting():
    part = TASK.validation()
    retrievers = {name: sparse_retriever(ListCorpus(world.corpus)) for name, world in part.worlds.items()}
    pairs = evidence_pairs(part.questions, part.worlds, retrievers, top_k=2)
    demos = [demo for pair in pairs for demo in (pair.follow, pair.remember)]
    small = demonstration_trajectories(demos[:4], PROTOCOL, 64)
    rows = 6  # odd to the number of pairs: the last batch is short
    shapes = {name: np.asarray(getattr(small, name)) for name in small.__dataclass_fields__}
    grown = {
        name: np.zeros(
            (rows, *((200, *x.shape[2:]) if x.shape[1:2] == small.tokens.shape[1:] else x.shape[1:])), x.dtype
        )
        for name, x in shapes.items()
    }
    return pairs, type(small)(**grown)


def test_share_of_pairs_whose_followed_evidence_scores_higher():
    pairs, shape = setting()
    assert len(pairs) > 12
    seen = []

    def score(batch):
        """Rows alternate follow, remember; every third pair prefers the remembered action."""
        assert batch.tokens.shape == shape.tokens.shape
        visible = np.zeros(batch.tokens.shape, np.float32)
        for b in range(len(batch)):
            number = len(seen)
            seen.append(b)
            follow = number % 2 == 0
            better = follow if (number // 2) % 3 else not follow
            visible[b] = 1.0 if better else 0.5
        return visible * (batch.role == Role.ACTION), np.zeros_like(visible)

    share = preference(pairs, PROTOCOL, 64, score, shape)
    n = len(pairs)
    assert share.n == n
    assert share.value == (n - len(range(0, n, 3))) / n


def test_padding_changes_no_value():
    pairs, shape = setting()
    small = demonstration_trajectories([pairs[0].follow], PROTOCOL, 64)
    big = padded(small, shape)
    n = small.tokens.shape[1]
    np.testing.assert_array_equal(big.tokens[:1, :n], small.tokens)
    assert not big.tokens[1:].any() and (big.turn[1:] == -1).all() and not big.action_mask[1:].any()
    np.testing.assert_array_equal(big.action_span[:1, : small.action_span.shape[1]], small.action_span)
