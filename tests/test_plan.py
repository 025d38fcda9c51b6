"""The plan compiles the real programs, here for simulated devices, and counts what they keep, move and compute."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cipo_jax.distributed.compiled import Cost, bytes_per_device, collective_bytes, compile_cost
from cipo_jax.distributed.mesh import mesh
from cipo_jax.learning.advantages import AdvantageConfig
from cipo_jax.models.cache import KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import parameter_count
from cipo_jax.plan import Phase, Plan, make_plan
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.advice import advice
from cipo_jax.training.programs import Programs, forward_flops
from cipo_jax.training.step import Method

DECODER = DecoderConfig(vocab_size=256, width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=64)
ROLLOUT = RolloutConfig(
    max_turns=1, top_k=1, prompt_tokens=32, action_tokens=16, observation_tokens=16, total_tokens=64, query_tokens=8,
    chunk=16, unroll=False,
)  # fmt: skip
METHOD = Method(questions=4, samples=2, minibatches=1)


def programs(fsdp, tensor, method=METHOD, decoder=DECODER, replica=1) -> Programs:
    return Programs(decoder, ROLLOUT, method, mesh(replica, fsdp, tensor))


def test_the_plan_of_a_small_experiment(capsys):
    plan = Plan(DECODER, ROLLOUT, METHOD, lambda devices: mesh(4, 1, 2, devices))
    phases = make_plan(plan, jax.devices())
    assert [phase.name for phase in phases] == ["rollout", "scoring", "update"]
    state = bytes_per_device(programs(1, 2, replica=4).state)
    update = phases[2]
    assert state <= update.cost.arguments <= state + 20_000  # and the batch
    assert update.cost.collectives["all-reduce"] > 0
    assert all(phase.cost.temporaries > 0 and phase.peak >= phase.resident for phase in phases)
    assert all(phase.fits(None) and phase.fits(phase.peak) and not phase.fits(phase.peak - 1) for phase in phases)
    out = capsys.readouterr().out
    assert "compiled update" in out
    assert "2 questions" not in out and "4 questions x 2 samples x 64 tokens" in out


def test_sizes_are_those_of_one_devices_shards():
    sizes = programs(4, 2).sizes()
    # 2 layers, keys and values, 8 rows over 4 data shards, 2 heads over 2, 64 places of 8 float32
    assert sizes["KV cache"] == 2 * 2 * (8 // 4) * (2 // 2) * 64 * 8 * 4
    assert sizes["gradients"] == sizes["parameters"]
    assert sizes["optimiser state"] > 2 * sizes["parameters"] - 100
    assert sizes["generation weights"] > sizes["parameters"]
    half = programs(4, 2, decoder=dataclasses.replace(DECODER, dtype="bfloat16")).sizes()
    assert half["KV cache"] * 2 == sizes["KV cache"] and half["generation weights"] * 2 == sizes["generation weights"]
    assert half["parameters"] == sizes["parameters"]


def test_the_cache_of_a_hybrid_is_what_its_arrays_hold():
    hybrid = dataclasses.replace(
        DECODER,
        period=("delta", "attention"),
        delta_key_heads=2,
        delta_value_heads=4,
        delta_key_dim=8,
        delta_value_dim=8,
    )
    p = programs(4, 2, decoder=hybrid)
    cache = jax.jit(lambda: KVCache.zeros(hybrid, 8, 64, p.policy.generation_rules))()
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(cache))
    assert p.sizes()["KV cache"] == held


def test_scoring_is_compiled_as_training_runs_it():
    micro = dataclasses.replace(METHOD, questions=8, samples=4, minibatches=2, microbatches=2)
    p = programs(4, 2, micro)
    assert (p.rows, p.micro, p.scoring_rows) == (32, (2, 8), 8)
    assert programs(4, 2, dataclasses.replace(micro, scoring_microbatches=1)).scoring_rows == 32
    small, whole = (
        compile_cost(programs(4, 2, dataclasses.replace(micro, scoring_microbatches=n)).scoring()) for n in (8, 1)
    )
    assert small.temporaries < 0.6 * whole.temporaries
    assert small.arguments == whole.arguments and small.outputs == whole.outputs
    # Without EALR the reference alone is scored, and no copies come along.
    outcome = programs(4, 2, dataclasses.replace(micro, advantages=AdvantageConfig(ealr_weight=0.0)))
    assert compile_cost(outcome.scoring()).arguments < small.arguments
    assert outcome.copies == 0 and p.copies == 64


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


TEXT = """
HloModule m
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = f32[64]{0} all-gather(%x), dimensions={0}
  %start = (f32[8]{0}, bf16[16,2]{1,0}) all-reduce-start(%y), to_apply=%add
}
%cond (p: (s32[], f32[8])) -> pred[] {
  %c = pred[] compare(%a, %b)
}
%steps (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} add(%q, %q), metadata={op_name="jit(f)/while/body/while/body/step/add"}
  %a2a = f32[2]{0} all-to-all(%q), dimensions={0}
}
%counted.body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, metadata={op_name="jit(f)/while/body/inner/while"}
}
%counted.cond (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}
%first.step (p: bf16[8]) -> bf16[16] {
  %ag.1 = bf16[16]{0} all-gather(%p), channel_id=7, frontend_attributes={chain_id="3"}
}
%second.step (p: bf16[8]) -> bf16[16] {
  %ag.2 = bf16[16]{0} all-gather(%p), channel_id=7, frontend_attributes={chain_id="3"}
}
%outer.body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %hoisted = f32[8]{0} copy(%q), metadata={op_name="jit(f)/while/body/while/body/step/add"}
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%steps, metadata={op_name="jit(f)/while/body/while"}
}
%other (p: bf16[8]) -> bf16[16] {
  %ag.3 = bf16[16]{0} all-gather(%p), channel_id=8, frontend_attributes={chain_id="4"}
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %cp = bf16[4]{0} collective-permute(%z), source_target_pairs={{0,1}}
  %v = (s32[], f32[8]) while(%t), condition=%counted.cond, body=%counted.body
  %u = (s32[], f32[8]) while(%t), condition=%cond, body=%outer.body, metadata={op_name="jit(f)/while"}
  %f = bf16[16]{0} fusion(%p), kind=kCustom, calls=%first.step
  %g = bf16[16]{0} fusion(%f), kind=kCustom, calls=%second.step
  %h = bf16[16]{0} fusion(%f), kind=kCustom, calls=%other
}
"""


@pytest.mark.parametrize("turns, inner", [(None, 1), ({"inner": 7, "inn": 100, "step": 7}, 7)])
def test_collective_bytes_of_a_text_counted_by_hand(turns, inner):
    # Three turns are noted, five are in a condition, and the scope of the loop inside those tells of its own. The two
    # steps of one gather count once. Of two loops around a scope the one whose body is in it turns.
    body = 3 + 5 * inner
    assert collective_bytes(TEXT, turns) == {
        "all-gather": body * 256 + 2 * 32,
        "all-reduce": body * 64,
        "collective-permute": 8,
        "all-to-all": inner * 8,
    }


def test_loops_over_data_turn_as_often_as_full_rows_ask(monkeypatch):
    monkeypatch.setattr("cipo_jax.scoring.logprobs.TOKENS_PER_BLOCK", 16)  # 8 columns of 8 rows on 4 shards
    p = programs(4, 2, dataclasses.replace(METHOD, questions=8, samples=4, minibatches=2, microbatches=2))
    assert p.turns("rollout") == {"prefill": 2, "extend": 0, "decode": 32}
    assert p.turns("update") == {"logprobs": 4}
    # The compiled update has a loop of that name with collectives in it (the softmax over the split vocabulary).
    few, many = (sum(compile_cost(p.update(), {"logprobs": n}).collectives.values()) for n in (1, 11))
    assert 0 < few < many


def test_flops_of_a_forward():
    size = parameter_count(programs(4, 2).params)
    embedding = 256 * 32
    assert forward_flops(DECODER, size, 10, 0, 0) == pytest.approx(20 * (size - embedding))
    assert forward_flops(DECODER, size, 10, 3, 0) == pytest.approx(20 * (size - embedding) + 6 * embedding)
    untied = dataclasses.replace(DECODER, tied=False)
    assert forward_flops(untied, size + embedding, 10, 3, 0) == forward_flops(DECODER, size, 10, 3, 0)
    # scores and values, 2 layers, 4 heads of 8
    assert forward_flops(DECODER, embedding, 1, 0, 100) == pytest.approx(2 * 2 * 2 * 4 * 8 * 100)


def test_flops_of_the_phases():
    p = programs(4, 2)
    size = p.policy.size
    row = forward_flops(DECODER, size, 64, 32, 32)
    assert p.flops()["update"] == 4 * 8 * row / 8  # 4: a forward, its repetition, and two for the gradients
    assert p.flops()["scoring"] > 8 * 2 * row / 8
    assert p.flops()["rollout"] < 8 * row / 8 * 1.2  # prompts once a question


@pytest.mark.parametrize(
    "phase, changes, first",
    [
        ("update", dict(microbatches=1), "Method.microbatches = 2  # 4 rows at a time instead of 8"),
        ("update", dict(microbatches=2), "mesh.tensor = 4 and mesh.fsdp = 2"),  # one row a device already
        ("scoring", dict(scoring_microbatches=1), "Method.scoring_microbatches = 2  # 4 rows at a time, not 8"),
        ("rollout", dict(), "mesh.tensor = 4 and mesh.fsdp = 2"),  # 2 x 64 tokens: the weights are larger
    ],
)
def test_advice_names_a_line_that_helps(phase, changes, first):
    p = programs(4, 2, dataclasses.replace(METHOD, **changes))
    assert advice(phase, p, p.sizes())[0].startswith(first)


def test_advice_divides_by_what_is_needed():
    p = programs(2, 2, dataclasses.replace(METHOD, questions=8, samples=8), replica=2)  # 64 rows, 16 a shard
    for shrink, microbatches in ((1.1, 2), (2.0, 2), (2.1, 4), (8.0, 8), (100.0, 16)):
        lines = advice("update", p, p.sizes(), shrink)
        assert lines[0] == f"Method.microbatches = {microbatches}  # {64 // microbatches} rows at a time instead of 64"
    assert advice("update", p, p.sizes(), math.inf)[0].startswith("more devices")
    phase = Phase("update", Cost(arguments=40, temporaries=90), 30, 0.0, 0.0)
    assert phase.shrink(100) == 3.0 and phase.shrink(70) == math.inf
    assert Phase("update", Cost(temporaries=140, error="Used 140"), 30, 0.0, 0.0).shrink(100) == 2.0


def test_advice_for_what_does_not_fit_at_all():
    long = dataclasses.replace(ROLLOUT, total_tokens=65536)
    for slots, first in ((None, "RolloutConfig.slots = 4 "), (4, "RolloutConfig.total_tokens = 32768 ")):
        p = Programs(DECODER, dataclasses.replace(long, slots=slots), METHOD, mesh(1, 4, 2))
        assert advice("rollout", p, p.sizes())[0].startswith(first)
    p = programs(2, 2, decoder=dataclasses.replace(DECODER, remat="dots"), replica=2)
    lines = advice("update", p, p.sizes())
    assert lines[0].startswith('DecoderConfig.remat = "full"')
    assert any(line.startswith("mesh.replica = 1") for line in lines)
    # On an accelerator float32 is the first thing to give up.
    p.mesh = SimpleNamespace(
        shape=p.mesh.shape, size=8, devices=SimpleNamespace(flat=[SimpleNamespace(platform="tpu")])
    )
    assert advice("update", p, p.sizes())[0].startswith('DecoderConfig.dtype = "bfloat16"')
