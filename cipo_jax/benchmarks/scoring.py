"""What evidence scoring costs, as a multiple of one visible forward of the same trajectories.

    python -m cipo_jax.benchmarks.scoring --json=scoring.json

Trajectories of 2,048 tokens with 4 turns of 300-token evidence and 120-token actions, on a softmax and a hybrid (Qwen3.5)
decoder of 8 layers and width 256, float32. Every row of the table is timed in pairs with the visible forward; the ratio is
the median over pairs.
"""

import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from cipo_jax.benchmarks.report import write_report
from cipo_jax.distributed.mesh import mesh
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.models.config import DecoderConfig
from cipo_jax.models.decoder import init_decoder
from cipo_jax.scoring.counterfactuals import Masked, RandomSpan, Removed, Several, Window
from cipo_jax.scoring.packing import pack, places_needed
from cipo_jax.scoring.passages import Replaced, non_supportive_only, supportive_only
from cipo_jax.scoring.score import Scorer
from cipo_jax.types import Role, Trajectories

FLAGS = flags.FLAGS
flags.DEFINE_string("json", None, "File for the numbers.")
flags.DEFINE_integer("repeats", 9, "Pairs per row.")
flags.DEFINE_integer("rows", 1, "Trajectories in a batch.")
flags.DEFINE_integer("block", 256, "Side of an attention tile.")
flags.DEFINE_multi_enum("decoder", ["softmax", "hybrid"], ["softmax", "hybrid"], "Decoders to time.")
flags.DEFINE_bool("all", True, "Time every counterfactual; False: those that the ratios need.")

LENGTH, TURNS, EVIDENCE, ACTION, TAG = 2048, 4, 300, 120, 4
SHAPE = dict(vocab_size=8192, width=256, depth=8, heads=8, kv_heads=2, head_dim=32, ffn=768)
HYBRID = dict(
    period=("delta", "delta", "delta", "attention"), rotary=0.25, gated=True, zero_centred=True, delta_key_heads=4,
    delta_value_heads=8, delta_key_dim=32, delta_value_dim=32,
)  # fmt: skip
CONFIGS = {"softmax": DecoderConfig(**SHAPE), "hybrid": DecoderConfig(**SHAPE, **HYBRID)}


def trajectories(rows: int, sigma: float = 0.0, seed: int = 0) -> Trajectories:
    """Host arrays of `rows` trajectories of `LENGTH` tokens.

    Args:
      rows: how many; each is a group of its own.
      sigma: of the logarithm of the actions' lengths, whose mean stays `ACTION`; 0 makes all equal.
      seed: fixes tokens and lengths.
    """
    rng = np.random.default_rng(seed)
    passages = 3
    out = Trajectories(
        tokens=rng.integers(0, SHAPE["vocab_size"], (rows, LENGTH)).astype(np.int32),
        role=np.full((rows, LENGTH), Role.PROMPT, np.int8),
        turn=np.full((rows, LENGTH), -1, np.int8),
        behaviour_logprob=np.zeros((rows, LENGTH), np.float32),
        length=np.full(rows, LENGTH, np.int32),
        group=np.arange(rows, dtype=np.int32),
        stop_reason=np.ones(rows, np.int32),
        action_span=np.zeros((rows, TURNS + 1, 2), np.int32),
        evidence_span=np.zeros((rows, TURNS + 1, 2), np.int32),
        content_span=np.zeros((rows, TURNS + 1, 2), np.int32),
        passage_span=np.zeros((rows, TURNS + 1, passages, 2), np.int32),
        passage_row=np.full((rows, TURNS + 1, passages), -1, np.int32),
    )
    for b in range(rows):
        lengths = np.full(TURNS + 1, ACTION)
        if sigma:
            drawn = rng.lognormal(-(sigma**2) / 2, sigma, TURNS + 1)
            lengths = np.maximum(1, np.round(ACTION * drawn * (TURNS + 1) / drawn.sum())).astype(int)
        at = LENGTH - int(lengths.sum()) - TURNS * EVIDENCE
        for t, n in enumerate(lengths.tolist()):
            out.action_span[b, t] = at, at + n
            out.role[b, at : at + n], out.turn[b, at : at + n] = Role.ACTION, t
            at += n
            if t < TURNS:
                out.evidence_span[b, t] = at, at + EVIDENCE
                out.content_span[b, t] = inside = at + TAG, at + EVIDENCE - TAG
                edges = np.linspace(*inside, passages + 1).astype(int)
                out.passage_span[b, t] = np.stack([edges[:-1], edges[1:]], 1)
                out.passage_row[b, t] = np.arange(passages)
                out.role[b, at : at + EVIDENCE], out.turn[b, at : at + EVIDENCE] = Role.OBSERVATION, t
                at += EVIDENCE
    return out


class Bench:
    """One decoder's programs, timed in pairs with its visible forward."""

    def __init__(self, config: DecoderConfig, rows: int, block: int, repeats: int):
        self.config, self.rows, self.repeats = config, rows, repeats
        rules = ShardingRules(mesh(devices=jax.devices()[:1]))
        graph, self.params = init_decoder(config, 0, rules)
        self.scorer = jax.jit(Scorer(graph, block).__call__)

    def run(self, tokens, length, active, stream=None) -> Callable[[], None]:
        """A call that scores and waits; compiled."""
        arguments = jax.device_put((tokens, length, active, np.float32(1.0), stream))

        def call():
            jax.block_until_ready(self.scorer(self.params, *arguments))

        call()
        return call

    def visible(self, t: Trajectories) -> Callable[[], None]:
        return self.run(t.tokens, t.length, t.action_mask)

    def packed(self, t: Trajectories, kind) -> tuple[Callable[[], None], int]:
        """Visible and counterfactual in one pass, and the copied places per row."""
        supportive = np.zeros(t.passage_row.shape, bool)
        supportive[..., 1] = True
        owned = [(b, c) for b in range(len(t)) for c in kind.copies(t, b, supportive[b])]
        owner, copies = [b for b, _ in owned], [c for _, c in owned]
        align = self.config.copy_alignment
        places = -(-places_needed(copies, owner, align) // 64) * 64
        (stream,) = pack(copies, owner, np.zeros(len(owner), int), (len(t), places), align).streams
        return self.run(t.tokens, t.length, t.action_mask, stream), places

    def per_turn(self, t: Trajectories) -> Callable[[], None]:
        """The naive way: one forward per turn, of the row up to its action without the evidence."""
        calls = [self.visible(t)]
        for turn in range(TURNS):
            (e0, e1), a1 = t.content_span[0, turn], t.action_span[0, turn + 1, 1]
            kept = np.r_[0:e0, e1:a1]
            n = np.full(len(t), len(kept), np.int32)
            active = (t.turn[:, kept] == turn + 1) & t.action_mask[:, kept]
            calls.append(self.run(t.tokens[:, kept], n, active))
        return lambda: [call() for call in calls]

    def ratio(self, call: Callable[[], None], base: Callable[[], None]) -> dict[str, float]:
        """Seconds of `call` and its ratio to `base`, medians over pairs."""
        pairs = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            base()
            middle = time.perf_counter()
            call()
            pairs.append((middle - start, time.perf_counter() - middle))
        return {
            "ratio": statistics.median(b / a for a, b in pairs),
            "seconds": statistics.median(b for _, b in pairs),
            "visible_seconds": statistics.median(a for a, _ in pairs),
        }


def measure(bench: Bench, everything: bool) -> dict[str, dict[str, float]]:
    """The table of one decoder."""
    t = trajectories(bench.rows)
    base = bench.visible(t)
    kinds = {"visible_masked": Masked(), "visible_masked_removed": Several([Masked(), Removed()])}
    if everything:
        text = tuple(tuple(np.random.default_rng(1).integers(0, 999, 64).tolist()) for _ in range(3))
        kinds |= {
            "visible_removed": Removed(),
            "visible_masked_unmasked_state": Masked(gdn_mask="unmasked"),
            "visible_masked_literal": Masked("action", "block", gdn_mask="unmasked"),
            "visible_replaced": Replaced(text),
            "visible_random_span": RandomSpan(),
            "visible_supportive_only": supportive_only(),
            "visible_non_supportive_only": non_supportive_only(),
            "visible_window_2": Window(2),
            "visible_trajectory": Window(),
        }
    table = {}
    for name, kind in kinds.items():
        call, places = bench.packed(t, kind)
        table[name] = bench.ratio(call, base) | {"copied_places": places}
    if everything:
        uneven = trajectories(bench.rows, sigma=0.8)
        base_uneven = bench.visible(uneven)
        for name in ("visible_masked", "visible_masked_removed"):
            call, places = bench.packed(uneven, kinds[name])
            table[f"{name}, log-normal actions"] = bench.ratio(call, base_uneven) | {"copied_places": places}

        def twice():
            base()
            base()

        table["two passes"] = bench.ratio(twice, base)
        table["a pass per turn"] = bench.ratio(bench.per_turn(t), base)
    return table


def main(_) -> None:
    tables = {}
    for name in FLAGS.decoder:
        bench = Bench(CONFIGS[name], FLAGS.rows, FLAGS.block, FLAGS.repeats)
        tables[name] = measure(bench, FLAGS.all)
        shown = Table(title=f"{name}: {LENGTH} tokens, {TURNS} turns of {EVIDENCE} + {ACTION}, {FLAGS.rows} row(s)")
        for column in ("scored", "x visible forward", "seconds", "copied places"):
            shown.add_column(column, justify="left" if column == "scored" else "right")
        for row, n in tables[name].items():
            shown.add_row(row, f"{n['ratio']:.2f}", f"{n['seconds']:.3f}", str(n.get("copied_places", "-")))
        Console(stderr=True).print(shown)
    wanted = ("visible_masked", "visible_masked_removed")
    ratios = {name: {key: table[key]["ratio"] for key in wanted} for name, table in tables.items()}
    write_report(json.loads(json.dumps({"ratios": ratios, "tables": tables})), FLAGS.json)


if __name__ == "__main__":
    app.run(main)
