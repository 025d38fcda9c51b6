"""The falsifier: does an action with much EALR really change when its evidence is deleted or replaced?"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import numpy as np
from scipy import stats

from cipo_jax.data.questions import Question
from cipo_jax.distributed.arrays import fetch
from cipo_jax.distributed.mesh import data_shards
from cipo_jax.distributed.sharding import GENERATION_RULES, ShardingRules
from cipo_jax.errors import UserError
from cipo_jax.evaluation.audit import AuditConfig, TranscriptScorer, action_kind
from cipo_jax.evaluation.closed_book import NoPassages
from cipo_jax.evaluation.statistics import wilson
from cipo_jax.evaluation.transcripts import Transcript
from cipo_jax.models.weights import Loaded
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.rewards.scores import normalise
from cipo_jax.rollout.config import RolloutConfig
from cipo_jax.rollout.engine import Rollout
from cipo_jax.rollout.environment import Environment
from cipo_jax.rollout.sampling import Sampling
from cipo_jax.scoring.counterfactuals import Masked, Removed, Several, drawn, transitions
from cipo_jax.training.progress import Progress

VARIANTS = ("visible", "deleted", "replaced")
STOPS = ("</search>", "</answer>", "</tool_call>")
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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Runs the study; the result holds the shares that changed, the AUC of EALR predicting it, and every action."""
    progress = progress or Progress(quiet=True)
    with progress.phase("scored", study.transitions) as phase:
        cases = _cases(transcripts, model, rules, tokenizer, config, study, phase.advance)
    if not cases:
        raise UserError("no transcript has evidence with a next action; the behaviour study needs some.")
    generate = Generator(model, rules, tokenizer, study.new_tokens, study.batch)
    wanted = [c.prefix[v] + tokenizer.encode(c.forced, add_special_tokens=False) for c in cases for v in VARIANTS]
    with progress.phase("generated", len(wanted)) as phase:
        texts = iter(generate(wanted, phase.advance))
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


def _cases(transcripts, model, rules, tokenizer, config, study, advance) -> list[Case]:
    masks = (Masked(), Removed())
    scorer = TranscriptScorer(model, rules, tokenizer, config, Several(masks))
    cases, seen = [], []  # evidence of earlier transcripts replaces that of later ones; the first ones wait for some
    waiting, known = [], 0
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
        advance(min(len(waiting), study.transitions) - known)
        known = min(len(waiting), study.transitions)
        if known == study.transitions:
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


class _Continuation(SearchR1):
    """Prompts are prefixes by their number, and one action follows."""

    stop_strings = terminal_stops = STOPS
    corrects_invalid = False
    prefixes: Sequence[Sequence[int]] = ()

    def prompt_ids(self, question: str) -> list[int]:
        return list(self.prefixes[int(question)])


class Generator:
    """Greedy continuation of prefixes of any length, up to a stop string or an end-of-turn token.

    Args:
      model: the decoder.
      rules: sharding table.
      tokenizer: decodes.
      new_tokens: tokens per continuation at most.
      batch: prefixes at a time.
    """

    def __init__(self, model: Loaded, rules: ShardingRules, tokenizer: Any, new_tokens: int, batch: int):
        self.model, self.new = model, new_tokens
        self.rules = ShardingRules(rules.mesh, GENERATION_RULES)
        shards = data_shards(rules.mesh)
        self.batch = -(-batch // shards) * shards
        self.protocol = _Continuation(tokenizer)
        self._rollouts: dict[int, Rollout] = {}

    def __call__(self, prefixes: Sequence[Sequence[int]], advance: Callable[[int], None] = lambda n: None) -> list[str]:
        """The text that follows each prefix; `advance` is told how many more are done."""
        self.protocol.prefixes = prefixes
        order = np.argsort([len(p) for p in prefixes], kind="stable")
        greedy, texts = Sampling(np.float32(0), np.int32(0), np.float32(1)), [""] * len(prefixes)
        for at in range(0, len(order), self.batch):
            part = order[at : at + self.batch]
            rollout = self._rollout(-(-len(prefixes[part[-1]]) // BUCKET) * BUCKET)
            asked = [Question(str(i), str(i), ("",)) for i in np.resize(part, self.batch)]
            written = fetch(rollout(self.model.params, asked, 1, jax.random.key(0), greedy)[0])
            for row, i in enumerate(part):
                start, end = written.action_span[row, 0]
                texts[i] = self.protocol.tokenizer.decode(written.tokens[row, start:end].tolist())
            advance(len(part))
        return texts

    def _rollout(self, width: int) -> Rollout:
        """The program for prefixes of up to `width` tokens."""
        if width not in self._rollouts:
            config = RolloutConfig(
                max_turns=0, top_k=1, prompt_tokens=width, action_tokens=self.new, observation_tokens=1,
                total_tokens=width + self.new, chunk=BUCKET,
            )  # fmt: skip
            environment = Environment(self.protocol, {"default": NoPassages()}, config.top_k, config.observation_tokens)
            self._rollouts[width] = Rollout(self.model.config, self.model.graph, config, environment, self.rules)
        return self._rollouts[width]


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
