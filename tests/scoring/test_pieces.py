"""A batch scored a few rows at a time has the numbers of one scored at once, on one device and on eight."""

import jax
import numpy as np
import pytest
import slow_scoring
from slow_scoring import one_device, random_trajectories

from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.decoder import abstract_decoder, parameter_shardings
from cipo_jax.scoring.counterfactuals import Masked
from cipo_jax.scoring.evidence import EvidenceScorer
from cipo_jax.scoring.pieces import ScorerInPieces
from cipo_jax.scoring.score import Scorer

ROWS = 24


@pytest.fixture(scope="module", autouse=True)
def float64():
    """Rounding depends on the number of rows; with it out of the way, equal means equal."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=slow_scoring.CONFIGS)
def case(request, float64):
    graph, params = slow_scoring.policy(request.param)
    trajectories = random_trajectories(np.random.default_rng(2), ROWS)
    whole = EvidenceScorer(Scorer(graph, 64), Masked(), one_device())(params, trajectories, trajectories).fetch()
    assert np.abs(whole[0] - whole[2]).max() > 0.05  # something was hidden
    return slow_scoring.CONFIGS[request.param], params, trajectories, whole


# 7 rows: four pieces of six; 9: three of eight, the last of them filled up; 16 on four shards: two of twelve.
@pytest.mark.parametrize("devices, rows", [((1, 1), 7), ((1, 1), 9), ((4, 2), 16)])
def test_pieces_equal_the_whole(case, devices, rows):
    config, params, trajectories, whole = case
    fsdp, tensor = devices
    rules = ShardingRules(mesh(fsdp=fsdp, tensor=tensor, devices=jax.devices()[: fsdp * tensor]))
    graph, shapes = abstract_decoder(config, rules)
    params = jax.device_put(jax.device_get(params), parameter_shardings(shapes, rules))
    seen = []

    class Recording(Scorer):
        def __call__(self, params, tokens, *args):
            seen.append(tokens.shape[0])
            return super().__call__(params, tokens, *args)

    scorer = EvidenceScorer(ScorerInPieces(Recording(graph, 64), rows, rules), Masked(), rules)
    pieces = scorer(params, rules.put_batch(trajectories), trajectories).fetch()
    assert seen and all(n <= rows for n in seen)
    for name, a, b in zip(("visible", "entropy", "hidden"), whole, pieces, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-9, err_msg=name)


def test_no_row_moves_between_devices(case):
    config, _, trajectories, _ = case
    rules = ShardingRules(mesh())
    graph, shapes = abstract_decoder(config, rules)
    shards = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.batch),
        (trajectories.tokens, trajectories.length, trajectories.action_mask),
    )

    class Counting(Scorer):
        def __call__(self, params, tokens, length, active, *_):
            return tokens.astype(np.float32) + length[:, None], active.astype(np.float32)

    program = jax.jit(ScorerInPieces(Counting(graph), 8, rules).__call__, out_shardings=rules.batch)
    text = program.lower(shapes, *shards).compile().as_text()
    assert "while" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
