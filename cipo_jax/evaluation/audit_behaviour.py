"""The falsifier: does an action with much EALR really change when its evidence is deleted or replaced?"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import stats

from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.audit import AuditConfig, TranscriptScorer, action_kind
from cipo_jax.evaluation.statistics import wilson
from cipo_jax.evaluation.transcripts import Transcript
from cipo_jax.models.cache import CachedContext, KVCache
from cipo_jax.models.weights import Loaded
from cipo_jax.rewards.scores import normalise
from cipo_jax.scoring.counterfactuals import Masked, Removed, Several, drawn, transitions

VARIANTS = ("visible", "deleted", "replaced")
STOPS = ("</search>", "</answer>", "</tool_call>", "<|im_end|>", "<|endoftext|>")
BUCKET = 256  # prefixes are padded to multiples of this, so that few shapes are compiled


@gin.configurable
@dataclasses.dataclass(frozen=True)
class BehaviourStudy:
    """What is regenerated.

    Attributes:
      transitions: at most so many, the first ones of the file.
      new_tokens: greedy tokens per action.
      batch: actions generated at a time.
      force_call: begin the regenerated action with the tag that the recorded one called with (`<search>` or `<answer>`),
        so that a model that does not know the protocol says something comparable (our choice; off for the agent itself).
      seed: of the draw of replacing text: the evidence of another transcript, repeated or cut to the same length.
    """

    transitions: int = 200
    new_tokens: int = 64
    batch: int = 8
    force_call: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One transition: its EALR by counterfactual, the kind of the recorded action, and a prefix per variant."""

    key: tuple[str, int]
    ealr: dict[str, float]
    kind: str
    forced: str
    prefix: dict[str, list[int]]


def behaviour(
    transcripts: Sequence[Transcript],
    model: Loaded,
    rules: ShardingRules,
    tokenizer: Any,
    config: AuditConfig,
    study: BehaviourStudy,
    progress: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Runs the study; the result holds the shares that changed, the AUC of EALR predicting it, and every action."""
    cases = _cases(transcripts, model, rules, tokenizer, config, study, progress)
    if not cases:
        raise UserError("no transcript has evidence with a next action; the behaviour study needs some.")
    generate = Generator(model, rules, tokenizer, study.new_tokens, study.batch)
    wanted = [c.prefix[v] + tokenizer.encode(c.forced, add_special_tokens=False) for c in cases for v in VARIANTS]
    texts = iter(generate(wanted))
    records = []
    for case in cases:
        said = {v: cut(case.forced + next(texts)) for v in VARIANTS}
        outcome = {v: decision(text) for v, text in said.items()}
        records.append(
            {
                "id": case.key[0], "turn": case.key[1], "action": case.kind, "ealr": case.ealr, "text": said,
                "changed": {v: outcome[v] != outcome["visible"] for v in VARIANTS[1:]},
                "called": {v: outcome[v][0] != "other" for v in VARIANTS},
            }
        )  # fmt: skip
    return summarise_behaviour(records) | {"records": records}


def summarise_behaviour(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of changed actions and the AUC of EALR predicting them, over all records and by kind of action."""
    out: dict[str, Any] = {"transitions": len(records)}
    kinds = {"all": records} | {k: [r for r in records if r["action"] == k] for k in ("search", "answer", "other")}
    for kind, some in kinds.items():
        if not some:
            continue
        out[kind] = {"n": len(some), "called": {v: float(np.mean([r["called"][v] for r in some])) for v in VARIANTS}}
        for variant in VARIANTS[1:]:
            changed = np.asarray([r["changed"][variant] for r in some])
            share = wilson(float(changed.mean()), len(changed))
            out[kind][variant] = {
                "changed": share.text(3),
                "auc": {name: auc([r["ealr"][name] for r in some], changed) for name in some[0]["ealr"]},
            }
    return out


def auc(score: Sequence[float], positive: np.ndarray) -> float:
    """The chance that a positive's score exceeds a negative's, ties counted half; NaN where one kind is absent."""
    score, positive = np.asarray(score, np.float64), np.asarray(positive, bool)
    if positive.all() or not positive.any():
        return float("nan")
    u = stats.mannwhitneyu(score[positive], score[~positive]).statistic
    return float(u / (positive.sum() * (~positive).sum()))


def cut(text: str) -> str:
    """An action's text up to its first stop string."""
    ends = [text.index(stop) + len(stop) for stop in STOPS if stop in text]
    return text[: min(ends)] if ends else text


def decision(text: str) -> tuple[str, str]:
    """What an action asks for: its kind and the normalised query or answer; of an action without a call, its text."""
    call = re.search(r"<(answer|search|tool_call)>(.*?)</\1>", text, re.DOTALL)
    if call:
        return ("answer" if call[1] == "answer" else "search"), normalise(call[2])
    return "other", normalise(text)


def _cases(transcripts, model, rules, tokenizer, config, study, progress) -> list[Case]:
    masks = (Masked(), Removed())
    scorer = TranscriptScorer(model, rules, tokenizer, config, Several(masks))
    cases, seen = [], []  # evidence of earlier transcripts replaces that of later ones; the first ones wait for some
    waiting = []
    for part, scores, _ in scorer(transcripts):
        batch = scores.trajectories
        ealr: dict[tuple[int, int], dict[str, float]] = {}
        for e in scores.effects():
            ealr.setdefault((e.row, e.turn), {})[e.kind] = e.ealr
        for b, transcript in enumerate(part):
            row = batch.map(lambda x, b=b: x[b : b + 1])
            for turn, e0, e1, a0, a1 in transitions(batch, b, "content"):
                waiting.append((transcript, row, turn, (e0, e1, a0, a1), ealr[b, turn]))
                seen.append((transcript.id, row.tokens[0, e0:e1]))
        progress(len(part))
        if len(waiting) >= study.transitions:
            break
    for transcript, row, turn, (e0, e1, a0, a1), value in waiting[: study.transitions]:
        others = [text for name, text in seen if name != transcript.id]
        if not others:
            continue
        text = others[int(drawn(study.seed, row, 0, turn, e0).integers(len(others)))]
        before = row.tokens[0, :a0].tolist()
        kind = action_kind(tokenizer.decode(row.tokens[0, a0:a1].tolist()))
        forced = f"<{kind}>" if study.force_call and kind != "other" else ""
        prefix = {
            "visible": before,
            "deleted": before[:e0] + before[e1:],
            "replaced": before[:e0] + np.resize(text, e1 - e0).tolist() + before[e1:],
        }
        cases.append(Case((transcript.id, turn), value, kind, forced, prefix))
    return cases


class Generator:
    """Greedy continuation of prefixes of any length.

    Args:
      model: the decoder.
      rules: sharding table.
      tokenizer: decodes.
      new_tokens: tokens per continuation; fewer where an end-of-turn token comes first.
      batch: prefixes at a time.
    """

    def __init__(self, model: Loaded, rules: ShardingRules, tokenizer: Any, new_tokens: int, batch: int):
        self.model, self.rules, self.tokenizer, self.new = model, rules, tokenizer, new_tokens
        shards = data_shards(rules.mesh)
        self.batch = -(-batch // shards) * shards
        vocabulary = tokenizer.get_vocab()
        names = {tokenizer.eos_token, "<|im_end|>", "<|endoftext|>"} & vocabulary.keys()
        self.ends = np.asarray(sorted(vocabulary[name] for name in names), np.int32)

    def __call__(self, prefixes: Sequence[Sequence[int]]) -> list[str]:
        """The text that follows each prefix."""
        order = np.argsort([len(p) for p in prefixes], kind="stable").tolist()
        texts = [""] * len(prefixes)
        for at in range(0, len(order), self.batch):
            part = order[at : at + self.batch]
            width = -(-max(len(prefixes[i]) for i in part) // BUCKET) * BUCKET
            tokens, length = np.zeros((self.batch, width), np.int32), np.ones(self.batch, np.int32)
            for row, i in enumerate(part):
                tokens[row, : len(prefixes[i])], length[row] = prefixes[i], len(prefixes[i])
            out = np.asarray(self._generate(self.model.params, *self.rules.put_batch((tokens, length))))
            for row, i in enumerate(part):
                ids = out[row].tolist()
                stop = next((n for n, token in enumerate(ids) if token in self.ends), len(ids))
                texts[i] = self.tokenizer.decode(ids[: stop + 1])
        return texts

    @functools.cached_property
    def _generate(self):
        config, new, ends = self.model.config, self.new, self.ends

        @jax.jit
        def generate(params, tokens, length):
            model = nnx.merge(self.model.graph, params)
            B, P = tokens.shape

            def forward(tokens, filled, count, cache):
                context = CachedContext(filled, count, tokens.shape[1], P + new)
                hidden, cache = model(tokens, context.positions, context, cache)
                last = jnp.take_along_axis(hidden, count[:, None, None] - 1, 1)
                return jnp.argmax(model.logits(last)[:, 0], -1).astype(jnp.int32), cache

            cache = KVCache.zeros(config, B, P + new, self.rules)
            token, cache = forward(tokens, jnp.zeros_like(length), length, cache)

            def going(carry):
                return (carry[0] < new) & ~carry[3].all()

            def step(carry):
                i, token, cache, done, out = carry
                out = out.at[:, i].set(token)
                done |= (token[:, None] == ends[None]).any(1)
                token, cache = forward(token[:, None], length + i, jnp.ones_like(length), cache)
                return i + 1, token, cache, done, out

            carry = (0, token, cache, jnp.zeros(B, bool), jnp.full((B, new), ends[0], jnp.int32))
            return jax.lax.while_loop(going, step, carry)[4]

        return generate


def behaviour_table(found: dict[str, Any]):
    """The shares and AUCs as a rich table."""
    from rich.table import Table

    table = Table(title=f"regenerated actions, {found['transitions']} transitions")
    for column in ("action", "n", "evidence", "changed", "AUC masked", "AUC removed", "made a call"):
        table.add_column(column, justify="left" if column in ("action", "evidence") else "right")
    for kind in ("all", "search", "answer", "other"):
        for variant in VARIANTS[1:] if kind in found else ():
            row = found[kind]
            aucs = [f"{row[variant]['auc'][name]:.3f}" for name in ("masked", "removed")]
            table.add_row(kind, str(row["n"]), variant, row[variant]["changed"], *aucs, f"{row['called'][variant]:.0%}")
    return table
