"""The plan compiles the real programs, here for simulated devices, and counts what they keep and move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cipo_jax.distributed.compiled import bytes_per_device, collective_bytes, compile_cost
from cipo_jax.distributed.mesh import mesh
from cipo_jax.models.config import DecoderConfig
from cipo_jax.plan import Plan, Programs, flops, make_plan
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.step import Method

DECODER = DecoderConfig(vocab_size=256, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=64)
ROLLOUT = RolloutConfig(
    max_turns=1, top_k=1, prompt_tokens=32, action_tokens=16, observation_tokens=16, total_tokens=64, query_tokens=8,
    chunk=16, unroll=False,
)  # fmt: skip


def test_the_plan_of_a_small_experiment(capsys):
    plan = Plan(DECODER, ROLLOUT, Method(questions=4, samples=2, minibatches=1), lambda devices: mesh(4, 1, 2, devices))
    phases = make_plan(plan, jax.devices())
    assert [phase.name for phase in phases] == ["rollout", "scoring", "update"]
    programs = Programs(plan, jax.devices())
    state = bytes_per_device(programs.state)
    update = phases[2]
    assert state <= update.cost.arguments <= state + 20_000  # and the batch
    assert update.cost.collectives["all-reduce"] > 0
    assert all(phase.cost.temporaries > 0 and phase.peak >= phase.resident for phase in phases)
    out = capsys.readouterr().out
    assert "compiled update" in out
    assert "2 questions" not in out and "4 questions x 2 samples x 64 tokens" in out


def test_sizes_are_those_of_one_devices_shards():
    plan = Plan(DECODER, ROLLOUT, Method(questions=4, samples=2, minibatches=1), lambda devices: mesh(1, 4, 2, devices))
    sizes = Programs(plan, jax.devices()).sizes()
    # 2 layers, keys and values, 8 rows over 4 data shards, 2 heads over 2, 64 places of 8 float32
    assert sizes["KV cache"] == 2 * 2 * (8 // 4) * (2 // 2) * 64 * 8 * 4
    assert sizes["gradients"] == sizes["parameters"]
    assert sizes["optimiser state"] > 2 * sizes["parameters"] - 100
    assert sizes["generation weights"] > sizes["parameters"]


def test_collectives_inside_a_loop_count_every_turn():
    devices = mesh(devices=jax.devices())
    split = NamedSharding(devices, PartitionSpec("fsdp"))
    whole = NamedSharding(devices, PartitionSpec())

    def body(carry, _):
        total = jax.lax.with_sharding_constraint(carry, whole).sum(0)
        return jax.lax.with_sharding_constraint(jnp.tanh(carry * total[None]), split), None

    def program(x):
        return jax.lax.scan(body, x, None, length=5)[0]

    lowered = jax.jit(program, out_shardings=split).lower(jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=split))
    moved = compile_cost(lowered).collectives
    assert sum(moved.values()) in (5 * 8 * 16 * 4, 5 * 16 * 4)  # gathers rows, or adds up their sums


def test_collective_bytes_of_a_text_counted_by_hand():
    text = """
HloModule m
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = f32[64]{0} all-gather(%x), dimensions={0}
  %start = (f32[8]{0}, bf16[16,2]{1,0}) all-reduce-start(%y), to_apply=%add
}
%cond (p: (s32[], f32[8])) -> pred[] {
  %c = pred[] compare(%a, %b)
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %cp = bf16[4]{0} collective-permute(%z), source_target_pairs={{0,1}}
}
"""
    assert collective_bytes(text) == {"all-gather": 3 * 256, "all-reduce": 3 * 64, "collective-permute": 8}


def test_flops_of_a_forward():
    assert flops(DECODER, 1000, 10, 0) == pytest.approx(20_000)
    assert flops(DECODER, 0, 1, 100) == pytest.approx(4 * 2 * 4 * 8 * 100)
    assert np.isfinite(flops(DECODER, 1, 1, 1))
