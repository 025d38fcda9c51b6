"""EALR's share of a training step, from its measured parts: rollout, reference, scoring, update.

    python -m cipo_jax.benchmarks.ealr_share --share_json=share.json
    python -m cipo_jax.benchmarks.ealr_share --finished_run=runs/quickstart

A step of one group of 16 trajectories under Qwen2.5-0.5B's shape (2,048 tokens, 4 turns of 300-token evidence, five actions
of 120 tokens, float32), and one of the quickstart's. Forwards and the update are timed on `rows` rows and counted for the
whole group; decoding is timed on the whole group at once. Retrieval, rewards and the host's work are not counted, so the
true shares are smaller.

Two shares: `masked`, what the copies cost beyond a visible forward (which a GRPO step does as well where it recomputes old
log-probs), and `scoring`, all of the scoring pass (for a GRPO step that takes old log-probs from its sampler).

With --finished_run, whole steps of that run's experiment instead, from its best checkpoint, with EALR and without in turn:
everything counts, and the share is that of the scoring pass and of all that is done with it.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from rich.console import Console
from rich.table import Table

from cipo_jax import config
from cipo_jax.benchmarks.report import write_report
from cipo_jax.benchmarks.scoring import Layout, trajectories
from cipo_jax.benchmarks.scoring_memory import QWEN2_5_0_5B
from cipo_jax.data.iteration import question_batches
from cipo_jax.distributed.mesh import mesh
from cipo_jax.learning.batch import update_batch
from cipo_jax.learning.objective import ClippedObjective
from cipo_jax.learning.state import adamw
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.config import DecoderConfig
from cipo_jax.scoring.counterfactuals import Masked
from cipo_jax.scoring.packing import pack, places_needed
from cipo_jax.training.arms import arm_method
from cipo_jax.training.checkpoints import Checkpoints, abstract_like
from cipo_jax.training.loop import Run
from cipo_jax.training.policy import Learner, Policy
from cipo_jax.training.step import Stepper

FLAGS = flags.FLAGS
flags.DEFINE_string("share_json", None, "File for the numbers.")
flags.DEFINE_multi_enum(
    "measured_step", ["quickstart", "qwen2_5_0_5b"], ["quickstart", "qwen2_5_0_5b"], "Steps to measure."
)
flags.DEFINE_integer("share_repeats", 3, "Runs of each part, or pairs of steps; the median counts.")
flags.DEFINE_string("finished_run", None, "Directory of a CIPO run whose steps are timed instead.")


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
      decoder: the policy's shape.
      layout: of a trajectory.
      places: tokens of a row; trajectories are padded.
      group: trajectories in the step; decoded together.
      rows: trajectories that are scored and trained on at a time.
      chunk: tokens that the rollout reads at once.
    """

    decoder: DecoderConfig
    layout: Layout
    places: int
    group: int
    rows: int
    chunk: int


STEPS = {
    "quickstart": Step(
        DecoderConfig(960, width=128, depth=3, heads=4, kv_heads=2, head_dim=32, ffn=384),
        Layout(length=118, turns=2, evidence=33, action=13, tag=3, vocab=960), places=168, group=96, rows=96, chunk=32,
    ),
    "qwen2_5_0_5b": Step(
        dataclasses.replace(QWEN2_5_0_5B, dtype="float32", param_dtype="float32"),
        Layout(vocab=151936), places=2048, group=16, rows=1, chunk=256,
    ),
}  # fmt: skip


class Parts:
    """The programs of a step, timed one by one."""

    def __init__(self, step: Step, repeats: int):
        self.step, self.repeats = step, repeats
        self.policy = Policy(step.decoder, mesh(devices=jax.devices()[:1]))
        t = trajectories(step.rows, layout=step.layout)
        extra = step.places - step.layout.length
        wide = (step.rows, step.layout.length)
        self.host = t.map(lambda x: np.pad(x, ((0, 0), (0, extra))) if x.shape == wide else x)

    def seconds(self, call: Callable, *arguments) -> float:
        """Median seconds of a compiled call."""
        times = []
        for _ in range(self.repeats + (self.repeats > 1)):
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            times.append(time.perf_counter() - start)
        return statistics.median(times[-self.repeats :])

    def measure(self) -> dict[str, float]:
        """Seconds of each part of the step."""
        s, t = self.step, self.host
        out = {"update": self._update()}  # before there are further parameters: it needs most memory
        params = self.policy.init(0)
        for name, tokens in (("decode", 1), ("extend", s.chunk)):
            out[name] = self.seconds(self._cached(params, tokens))
        scorer = jax.jit(self.policy.scorer.__call__)
        row = jax.device_put((t.tokens, t.length, t.action_mask))
        arguments = (params, *row, np.float32(1.0))
        out["visible"] = self.seconds(scorer.lower(*arguments).compile(), *arguments)
        stream = jax.device_put(self._copies())
        out["copied_places"] = stream.token.shape[1]
        arguments = (*arguments, stream)
        out["visible_masked"] = self.seconds(scorer.lower(*arguments).compile(), *arguments)
        return out

    def _cached(self, params, tokens: int):
        """A compiled step of the rollout that reads `tokens` per row."""
        s, filled = self.step, self.step.layout.length // 2  # on average
        unroll, read = jax.default_backend() == "cpu", min(filled + tokens, s.places)  # as the rollout's engine does
        cache = KVCache.zeros(s.decoder, s.group, s.places, split=unroll, reads=(read,))
        layers = jax.jit(lambda p: nnx.merge(self.policy.graph, p).unstacked())(params) if unroll else False
        filled = jnp.full(s.group, filled, jnp.int32)
        ids = jnp.zeros((s.group, tokens), jnp.int32)

        def step(params, layers, cache, ids, filled):
            model = nnx.merge(self.policy.graph, params)
            context = CachedContext(filled, jnp.full_like(filled, tokens), tokens, s.places, read)
            hidden, cache = model(ids, context.positions, context, cache, unroll=layers)
            return jnp.argmax(model.logits(hidden[:, -1]), -1), cache

        compiled = jax.jit(step, donate_argnums=2).lower(params, layers, cache, ids, filled).compile()

        kept = [cache]

        def call():
            token, kept[0] = compiled(params, layers, kept[0], ids, filled)
            return token

        return call

    def _copies(self):
        t, B = self.host, len(self.host)
        owned = [(b, c) for b in range(B) for c in Masked().copies(t, b)]
        owner, copies = [b for b, _ in owned], [c for _, c in owned]
        align = self.step.decoder.copy_alignment
        places = -(-places_needed(copies, owner, align) // 16) * 16
        (stream,) = pack(copies, owner, np.zeros(len(owner), int), (B, places), align).streams
        return stream

    def _update(self) -> float:
        t = self.host
        learner = Learner(self.policy, ClippedObjective(kl_weight=1e-3), adamw())
        advantage = np.where(t.action_mask, np.float32(0.5), np.float32(0))
        zero = np.zeros(t.tokens.shape, np.float32)
        batch = update_batch(t, advantage, zero - 1, zero - 1, skip_zero_groups=False)
        state = [learner.init(self.policy.init(0))]

        def call():
            state[0], metrics = learner.update(state[0], batch, 0)
            return metrics

        if self.repeats == 1:
            call()  # compiles
        return self.seconds(call)


def shares(step: Step, parts: dict[str, float]) -> dict[str, float]:
    """Seconds of the whole step by part, and EALR's shares in it."""
    s, batches = step, step.group / step.rows
    at = s.layout
    prompt = at.length - at.turns * at.evidence - (at.turns + 1) * at.action
    reads = math.ceil(prompt / s.chunk) / s.group + at.turns * math.ceil(
        at.evidence / s.chunk
    )  # the prompt: once a group
    out = {
        "rollout": parts["decode"] * (at.turns + 1) * at.action + parts["extend"] * reads,
        "reference": parts["visible"] * batches,
        "visible": parts["visible"] * batches,
        "copies": (parts["visible_masked"] - parts["visible"]) * batches,
        "update": parts["update"] * batches,
    }
    out["step"] = sum(out.values())
    out["masked_share"] = out["copies"] / out["step"]
    out["scoring_share"] = (out["copies"] + out["visible"]) / out["step"]
    return out


def steps_of_a_run(run_dir: Path, pairs: int) -> dict[str, float]:
    """Median seconds of a finished run's step with EALR and without, and EALR's share: over pairs on the same questions."""
    config.parse([str(run_dir / "config.gin")])
    run = Run()
    task, policy = run.task(), Policy(run.decoder, run.mesh())
    stepper = Stepper(run.method, policy, task, run.rollout, run.seed)
    state = stepper.learner.init(policy.init(run.seed))
    with Checkpoints(run_dir / "checkpoints", read_only=True) as saved:
        state = saved.restore(abstract_like(state), saved.selected_step)[0]
    reference = jax.tree.map(jnp.copy, state.params)
    batches = question_batches(task.train, run.method.questions, run.seed)
    seconds: dict[str, list[float]] = {"cipo": [], "outcome": []}
    for pair in range(pairs + 2):  # two to warm up
        for arm in sorted(seconds, reverse=pair % 2 == 1):
            stepper.use(arm_method(run.method, arm), task, run.seed)
            start = time.perf_counter()
            state, _ = stepper(state, reference, batches[pair], pair)
            jax.block_until_ready(state)
            seconds[arm].append(time.perf_counter() - start)
    kept = {arm: times[2:] for arm, times in seconds.items()}
    return {arm: statistics.median(times) for arm, times in kept.items()} | {
        "share": statistics.median(1 - without / whole for whole, without in zip(*kept.values()))
    }


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)  # the checkpoint library tells a lot
    if FLAGS.finished_run:
        write_report(steps_of_a_run(Path(FLAGS.finished_run), FLAGS.share_repeats), FLAGS.share_json)
        return
    found = {}
    for name in FLAGS.measured_step:
        parts = Parts(STEPS[name], FLAGS.share_repeats).measure()
        found[name] = {"parts": parts, "step": shares(STEPS[name], parts)}
        table = Table(title=f"{name}: one step, {STEPS[name].group} trajectories")
        table.add_column("part")
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
        step = found[name]["step"]
        for part in ("rollout", "reference", "visible", "copies", "update", "step"):
            table.add_row(part, f"{step[part]:.3f}", f"{step[part] / step['step']:.1%}")
        Console(stderr=True).print(table)
    write_report(json.loads(json.dumps(found)), FLAGS.share_json)


if __name__ == "__main__":
    app.run(main)
