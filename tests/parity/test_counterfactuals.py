"""Packed counterfactual scores against transformers: explicit 4-D masks where edges are masked, shorter rows elsewhere.

Random trajectories, several packed in a row. CIPO_PARITY_TRAJECTORIES (default 8) says how many per model; from 40 on every
batch of ten takes a quarter of the counterfactuals, in turn.
"""

import os

import decoding
import numpy as np
import pytest
import random_checkpoints as checkpoints
import reference as models
import torch
from slow_scoring import random_trajectories, slow_rows

from cipo_jax.scoring.counterfactuals import Masked, RandomSpan, Removed, Several, Window
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.scoring.passages import OnlyPassages, Replaced, non_supportive_only, supportive_only
from cipo_jax.scoring.score import Scorer

COUNT = int(os.environ.get("CIPO_PARITY_TRAJECTORIES", 8))
TOGETHER = 10  # trajectories in a batch
SHARES = 4  # batches that share the counterfactuals among them
LENGTH, PLACES, LONGEST, COPIES = 1280, 2560, 900, 4096
VOCABULARY = checkpoints.COMMON["vocab_size"]
DELETIONS = [
    Masked(), Masked(evidence_span="block", name="masked_block"), Removed(), Removed("block", "removed_block"),
    Replaced(passages=((7, 8, 9), (11,) * 40)), RandomSpan(), supportive_only(), non_supportive_only(True),
    OnlyPassages(1), Window(2), Window(contiguous=True),
]  # fmt: skip
EDGES = [
    Masked(rows, span, "unmasked", f"{rows}_{span}")
    for rows in ("post_evidence", "predictor", "action")
    for span in ("content", "block")
]


# Qwen3.5 with its real heads of 128: a query or key of few channels now and then nearly vanishes before it is normalised,
# which multiplies the rounding of what made it, in any implementation (16 channels: 3e-4 nats against float64, once in 8,000
# tokens; transformers 1e-4).
CASES = {name: checkpoints.CONFIGS[name] for name in ("qwen2_ratio7", "qwen3_ratio3", "llama_ratio3")}
CASES["qwen3_5"] = checkpoints.hybrid(48, 4, 3, 1, 56, True, key_heads=1, value_heads=2, dk=128, dv=128)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    hf = CASES[request.param] | {"max_position_embeddings": 2 * LENGTH}
    folder = checkpoints.write(tmp_path_factory.mktemp(request.param), hf)
    return request.param, decoding.load(folder), models.load(folder)


def trajectories_of_all_sizes(seed: int):
    """Up to 6 turns with evidence of up to 900 tokens, as many as fit."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            longest = int(rng.choice([6, 40, 150, LONGEST]))
            return random_trajectories(rng, 1, turns=6, length=LENGTH, vocab=VOCABULARY, longest=longest)
        except AssertionError:
            continue


def naive(model, ids, positions, mask) -> np.ndarray:
    """Log-probs of a row's tokens at their own index, by transformers."""
    n = len(ids)
    seen = np.tril(np.ones((n, n), bool)) if mask is None else mask
    bias = torch.from_numpy(np.where(seen, 0.0, np.finfo(np.float32).min).astype(np.float32))[None, None]
    with torch.no_grad():
        logits = model(
            torch.from_numpy(np.asarray(ids, np.int64))[None],
            attention_mask=bias,
            position_ids=torch.from_numpy(np.asarray(positions, np.int64))[None],
            use_cache=False,
        ).logits[0]
    logp = torch.log_softmax(logits[:-1].double(), -1).numpy()
    return np.concatenate([[0.0], logp[np.arange(n - 1), np.asarray(ids)[1:]]])


def batch(seeds):
    parts = [trajectories_of_all_sizes(seed) for seed in seeds]
    fields = {f: np.concatenate([getattr(p, f) for p in parts]) for f in vars(parts[0])}
    return type(parts[0])(**{**fields, "group": np.arange(len(parts), dtype=np.int32)})


def test_packed_scores_equal_transformers(case):
    name, loaded, model = case
    # transformers' delta layers know no mask over edges: there the evidence flows through the state, on both sides.
    everything = [*DELETIONS, *EDGES]
    scorer = EvidenceScorer(Scorer(loaded.graph), Masked(), decoding.one_device(), COPIES)
    errors, worst, checked, shared_rows = [], [], 0, 0
    for at in range(0, COUNT, TOGETHER):
        share = at // TOGETHER % SHARES
        kinds = everything if COUNT < SHARES * TOGETHER else everything[share::SHARES]
        scorer.counterfactual = Several(kinds)
        trajectories = batch(range(at, min(at + TOGETHER, COUNT)))
        supportive = np.random.default_rng(at).random(trajectories.passage_row.shape) < 0.4
        scores = scorer.score_packed(loaded.params, trajectories, PLACES, supportive, rows=2)
        shared_rows += (np.bincount(scores.rows.row) > 1).sum()
        effects = {(e.kind, e.row, e.turn, e.action): e.difference for e in scores.effects()}
        visible, _ = scores.visible()
        for b, n in enumerate(trajectories.length.tolist()):
            plain = naive(model, trajectories.tokens[b, :n], np.arange(n), None)
            errors.append(np.abs(visible[b, :n] - plain)[trajectories.action_mask[b, :n]])
            for kind in kinds:
                for turn, row, where in slow_rows(kind, trajectories, b, supportive[b]):
                    values = naive(model, *row)
                    want: dict[int, list[float]] = {}
                    for place, index in where.items():
                        want.setdefault(int(trajectories.turn[b, place]), []).append(plain[place] - values[index])
                    for action, difference in want.items():
                        error = np.abs(effects.pop((kind.name, b, turn, action)) - np.asarray(difference))
                        errors.append(error)
                        worst.append((error.max(), kind.name, at + b, turn, action, n))
                        checked += 1
        assert not effects
    assert checked > COUNT and shared_rows
    errors = np.concatenate(errors)
    print(
        f"{name}: {COUNT} trajectories, {checked} actions, {errors.size} tokens, max {errors.max():.2e}, mean "
        f"{errors.mean():.2e} nats; worst {sorted(worst)[-3:]}"
    )
    assert errors.max() <= 1e-4
    assert errors.mean() <= 1e-5
