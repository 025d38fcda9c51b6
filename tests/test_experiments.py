"""The shipped experiments are read as `train` reads them, and hold what the papers published."""

import pytest

from cipo_jax import config
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.protocols.qwen_tools import QwenTools
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.rewards.outcome import f1, f1_format
from cipo_jax.training.loop import Run

CIPO = dict(
    questions=32, samples=16, minibatches=2, turns=4, top_k=3, total=4096, action=500, observation=500, reward=f1,
    ealr=1.0, protocol=SearchR1, seed=0,
)  # fmt: skip
SHAPES = dict(
    questions=64, samples=5, minibatches=1, turns=10, top_k=5, total=8192, action=2048, observation=1024,
    reward=f1_format, ealr=0.0, protocol=QwenTools, seed=42, steps=312,
)  # fmt: skip
EXPERIMENTS = {
    "cipo_qwen2_5_3b": dict(CIPO, width=2048, depth=36, steps=200),
    "cipo_qwen2_5_7b": dict(CIPO, width=3584, depth=28, steps=200),
    "reward_shapes_qwen3_5_0_8b": dict(SHAPES, width=1024, depth=24),
}


def test_every_shipped_experiment_is_listed(repository):
    assert {path.stem for path in (repository / "configs" / "experiments").glob("*.gin")} == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_holds_what_was_published(name, repository, clean_gin):
    config.parse([f"configs/experiments/{name}.gin"])
    run, want = Run(), EXPERIMENTS[name]
    m, c, optimizer, o = run.method, run.rollout, run.method.optimizer(), run.method.objective
    assert dict(
        questions=m.questions, samples=m.samples, minibatches=m.minibatches, turns=c.max_turns, top_k=c.top_k,
        total=c.total_tokens, action=c.action_tokens, observation=c.observation_tokens, reward=m.outcome_reward,
        ealr=m.advantages.ealr_weight, protocol=clean_gin.query_parameter("qa_task.protocol").configurable.wrapped,
        seed=run.seed, width=run.decoder.width, depth=run.decoder.depth, steps=run.steps,
    ) == want  # fmt: skip
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.decay_steps) == (1e-6, 0, None)
    assert optimizer.max_grad_norm == 1.0 and m.temperature == 1.0
    assert type(o) is ClippedObjective and (o.clip_low, o.clip_high, o.kl_weight, o.kl_estimator) == (
        0.2,
        0.2,
        1e-3,
        "k3",
    )
    assert (run.decoder.dtype, run.decoder.param_dtype) == ("bfloat16", "float32")
    # A microbatch of the update and of scoring is a whole number of rows on every data shard of the mesh it is meant for.
    assert m.questions * m.samples % (m.minibatches * m.microbatches) == 0
    # Its file opens with the commands that plan and start it.
    text = (repository / "configs" / "experiments" / f"{name}.gin").read_text()
    assert f"cipo_jax.plan --gin_file=configs/experiments/{name}.gin --topology=v5" in text
    assert "cipo_jax.train" in text and text.index("SEED") < text.index("include 'models/")
