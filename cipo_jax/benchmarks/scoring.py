"""What evidence scoring costs, as a multiple of one visible forward of the same trajectories.

    python -m cipo_jax.benchmarks.scoring --json=scoring.json

Trajectories of 2,048 tokens with 4 turns of 300-token evidence and 120-token actions, on a softmax and a hybrid (Qwen3.5)
decoder of 8 layers and width 256, float32. Every row of the table is timed in pairs with the visible forward; the ratio is
the median over pairs.
"""

import dataclasses
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
flags.DEFINE_integer("rows_together", 1, "Trajectories in a batch.")
flags.DEFINE_integer("block", None, "Side of an attention tile; what suits the device by default.")
flags.DEFINE_multi_enum("decoder", ["softmax", "hybrid"], ["softmax", "hybrid"], "Decoders to time.")
flags.DEFINE_bool("all", True, "Time every counterfactual; False: those that the ratios need.")


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a trajectory is made of, in tokens: a prompt that fills `length`, then actions with evidence between them."""

    length: int = 2048
    turns: int = 4
    evidence: int = 300
    action: int = 120
    tag: int = 4  # at each end of the evidence
    vocab: int = 8192


SHAPE = dict(vocab_size=8192, width=256, depth=8, heads=8, kv_heads=2, head_dim=32, ffn=768)
HYBRID = dict(
    period=("delta", "delta", "delta", "attention"), rotary=0.25, gated=True, zero_centred=True, delta_key_heads=4,
    delta_value_heads=8, delta_key_dim=32, delta_value_dim=32,
)  # fmt: skip
CONFIGS = {"softmax": DecoderConfig(**SHAPE), "hybrid": DecoderConfig(**SHAPE, **HYBRID)}


def trajectories(rows: int, sigma: float = 0.0, seed: int = 0, layout: Layout = Layout()) -> Trajectories:
    """Host arrays of `rows` trajectories of one length.

    Args:
      rows: how many; each is a group of its own.
      sigma: of the logarithm of the actions' lengths, whose mean stays; 0 makes all equal.
      seed: fixes tokens and lengths.
      layout: lengths of the parts.
    """
    rng = np.random.default_rng(seed)
    passages, L, T = 3, layout.length, layout.turns
    out = Trajectories(
        tokens=rng.integers(0, layout.vocab, (rows, L)).astype(np.int32),
        role=np.full((rows, L), Role.PROMPT, np.int8),
        turn=np.full((rows, L), -1, np.int8),
        behaviour_logprob=np.zeros((rows, L), np.float32),
        length=np.full(rows, L, np.int32),
        group=np.arange(rows, dtype=np.int32),
        stop_reason=np.ones(rows, np.int32),
        action_span=np.zeros((rows, T + 1, 2), np.int32),
        evidence_span=np.zeros((rows, T + 1, 2), np.int32),
        content_span=np.zeros((rows, T + 1, 2), np.int32),
        passage_span=np.zeros((rows, T + 1, passages, 2), np.int32),
        passage_row=np.full((rows, T + 1, passages), -1, np.int32),
    )
    for b in range(rows):
        lengths = np.full(T + 1, layout.action)
        if sigma:
            drawn = rng.lognormal(-(sigma**2) / 2, sigma, T + 1)
            lengths = np.maximum(1, np.round(layout.action * drawn * (T + 1) / drawn.sum())).astype(int)
        at = L - int(lengths.sum()) - T * layout.evidence
        for t, n in enumerate(lengths.tolist()):
            out.action_span[b, t] = at, at + n
            out.role[b, at : at + n], out.turn[b, at : at + n] = Role.ACTION, t
            at += n
            if t < T:
                out.evidence_span[b, t] = at, at + layout.evidence
                out.content_span[b, t] = inside = at + layout.tag, at + layout.evidence - layout.tag
                edges = np.linspace(*inside, passages + 1).astype(int)
                out.passage_span[b, t] = np.stack([edges[:-1], edges[1:]], 1)
                out.passage_row[b, t] = np.arange(passages)
                out.role[b, at : at + layout.evidence], out.turn[b, at : at + layout.evidence] = Role.OBSERVATION, t
                at += layout.evidence
    return out


class Bench:
    """One decoder's programs, timed in pairs with its visible forward."""

    def __init__(self, config: DecoderConfig, rows: int, block: int | None, repeats: int, layout: Layout = Layout()):
        self.config, self.rows, self.repeats, self.layout = config, rows, repeats, layout
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
        places = -(-places_needed(copies, owner, align) // 16) * 16
        (stream,) = pack(copies, owner, np.zeros(len(owner), int), (len(t), places), align).streams
        return self.run(t.tokens, t.length, t.action_mask, stream), places

    def per_turn(self, t: Trajectories) -> Callable[[], None]:
        """The naive way: one forward per turn, of the row up to its action without the evidence."""
        calls = [self.visible(t)]
        for turn in range(self.layout.turns):
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
    t = trajectories(bench.rows, layout=bench.layout)
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
        uneven = trajectories(bench.rows, sigma=0.8, layout=bench.layout)
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
        bench = Bench(CONFIGS[name], FLAGS.rows_together, FLAGS.block, FLAGS.repeats)
        tables[name], at = measure(bench, FLAGS.all), bench.layout
        shown = Table(
            title=f"{name}: {FLAGS.rows_together} x {at.length} tokens, {at.turns} turns of {at.evidence} + {at.action}"
        )
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
