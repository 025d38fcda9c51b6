"""What an agent did with its evidence (prior-driven, evidence-driven, malformed or other), and metrics over episodes.

The classes are ours, for questions of the synthetic world, where every passage's fact is known. They apply to
**conflict** episodes: the gold answer differs from the memory's answer, and the memory's answer is in no passage that
was retrieved, so that who answers it can only have remembered it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cipo_jax.data.questions import Question
from cipo_jax.data.world import CAPITAL, Fact, World
from cipo_jax.errors import UserError
from cipo_jax.protocols.base import ActionKind
from cipo_jax.rewards.scores import contains_tokens, exact_match, token_f1
from cipo_jax.rollout.episode import Episode
from cipo_jax.types import StopReason

MALFORMED, PRIOR_DRIVEN, EVIDENCE_DRIVEN, OTHER = "malformed", "prior_driven", "evidence_driven", "other"
CLASSES = (MALFORMED, PRIOR_DRIVEN, EVIDENCE_DRIVEN, OTHER)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """One episode judged. The fields after `f1` are None where the question carries no memory's answer.

    Attributes:
      em: exact match with a gold answer, 0 or 1.
      f1: token F1, in [0, 1].
      conflict: whether gold differs from the memory's answer.
      behaviour: one of `CLASSES`; None unless the episode is a conflict episode (see the module).
      hop1_prior: whether the second query names the memory's capital, where that differs from the world's, else None.
        An episode without a second query names neither.
      hop1_evidence: whether the second query names the world's capital, likewise.
      gold_rank: place (from 1) of the passage that states the answer, in the first observation that shows it; 0 where
        it was never shown.
      misled: whether the answer is the one that a misleading passage gives; None where the question has none.
    """

    em: float
    f1: float
    conflict: bool | None = None
    behaviour: str | None = None
    hop1_prior: bool | None = None
    hop1_evidence: bool | None = None
    gold_rank: int | None = None
    misled: bool | None = None


def judge(episode: Episode, world: World | None = None) -> Behaviour:
    """Judges one episode.

    Args:
      episode: what the agent did.
      world: the world its searches saw; needed for questions whose `meta` has a `prior_answer`.
    """
    question, meta = episode.question, episode.question.meta
    em, f1 = exact_match(episode.answer, question.golds), token_f1(episode.answer, question.golds)
    if "prior_answer" not in meta:
        return Behaviour(em, f1)
    if world is None:
        raise UserError(
            f"question {question.id!r} needs the world {question.corpus!r} to be judged; pass it in worlds."
        )
    conflict = exact_match(meta["prior_answer"], question.golds) == 0.0
    shown = [world.facts[row] for turn in episode.turns for row in turn.passages]
    decidable = conflict and not any(contains_tokens(fact.text(), meta["prior_answer"]) for fact in shown)
    hop1_prior, hop1_evidence = _second_query(episode)
    return Behaviour(
        em=em,
        f1=f1,
        conflict=conflict,
        behaviour=_classify(episode, shown) if decidable else None,
        hop1_prior=hop1_prior,
        hop1_evidence=hop1_evidence,
        gold_rank=_gold_rank(episode, world),
        misled=bool(exact_match(episode.answer, [meta["misleading"]])) if "misleading" in meta else None,
    )


def _classify(episode: Episode, shown: Sequence[Fact]) -> str:
    if episode.malformed:
        return MALFORMED
    if exact_match(episode.answer, [episode.question.meta["prior_answer"]]):
        return PRIOR_DRIVEN
    if exact_match(episode.answer, supported_answers(episode.question, shown)):
        return EVIDENCE_DRIVEN
    return OTHER


def supported_answers(question: Question, shown: Iterable[Fact]) -> list[str]:
    """The objects that the passages shown state for the asked relation of the capital that they name.

    Hearsay (misleading passages) states nothing.
    """
    shown = list(shown)
    country, relation = question.meta["country"], question.meta["relation"]
    cities = {fact.object for fact in shown if fact.kind == CAPITAL and fact.subject == country}
    return [fact.object for fact in shown if fact.kind == relation and fact.subject in cities]


def _second_query(episode: Episode) -> tuple[bool | None, bool | None]:
    meta = episode.question.meta
    if meta["prior_capital"] == meta["capital"]:
        return None, None
    queries = [turn.action.query or "" for turn in episode.turns if turn.action.kind is ActionKind.SEARCH]
    second = queries[1] if len(queries) > 1 else ""
    return contains_tokens(second, meta["prior_capital"]), contains_tokens(second, meta["capital"])


def _gold_rank(episode: Episode, world: World) -> int:
    meta = episode.question.meta
    for turn in episode.turns:
        for place, row in enumerate(turn.passages, 1):
            fact = world.facts[row]
            if fact.kind == meta["relation"] and fact.subject == meta["capital"]:
                return place
    return 0


def judge_all(episodes: Sequence[Episode], worlds: Mapping[str, World] | None = None) -> list[Behaviour]:
    """One `Behaviour` per episode; `worlds` by the corpus names of the questions."""
    worlds = worlds or {}
    return [judge(episode, worlds.get(episode.question.corpus)) for episode in episodes]


def summarise(episodes: Sequence[Episode], worlds: Mapping[str, World] | None = None) -> dict[str, float]:
    """Metrics over episodes. A metric that is not defined (no episode to average over) is absent.

    Over all episodes: `episodes` (count), `em`, `f1`, `searches` (executed, per trajectory), `actions` and `tokens`
    (per trajectory, prompt included), `valid_answer` (share with a closed, non-empty answer), `malformed_all` (share
    with none or with an unparsable action), and `stop_<reason>` (shares that sum to 1).

    Over episodes with a memory's answer: `conflict_share`; `gold_shown` (share that saw the passage that states the
    answer) and `em_gold_rank_<k>`, `gold_rank_<k>_share`, `em_gold_not_shown`.

    Over conflict episodes: `malformed`, `prior_driven`, `evidence_driven`, `other`, which sum to 1.
    `conflict_episodes` counts them and `conflict_left_out` the others whose gold differs from the memory's answer.

    Over episodes whose capital differs from the memory's: `hop1_prior`, `hop1_evidence`. Over those with a misleading
    passage in their world: `misled`.

    Args:
      episodes: what the agent did.
      worlds: the worlds by corpus name; needed for questions of the synthetic world.
    """
    return summarise_behaviours(episodes, judge_all(episodes, worlds))


def summarise_behaviours(episodes: Sequence[Episode], judged: Sequence[Behaviour]) -> dict[str, float]:
    """`summarise` for episodes that were judged already, one `Behaviour` per episode."""
    out: dict[str, float] = {"episodes": float(len(episodes))}
    if not episodes:
        return out
    out["em"] = _mean(b.em for b in judged)
    out["f1"] = _mean(b.f1 for b in judged)
    out["searches"] = _mean(e.searches for e in episodes)
    out["actions"] = _mean(len(e.turns) for e in episodes)
    out["tokens"] = _mean(e.length for e in episodes)
    out["valid_answer"] = _mean(bool((e.answer or "").strip()) for e in episodes)
    out["malformed_all"] = _mean(e.malformed for e in episodes)
    reasons = Counter(e.stop_reason for e in episodes)
    out |= {f"stop_{reason}": reasons[reason] / len(episodes) for reason in StopReason.NAMES.values()}

    known = [b for b in judged if b.conflict is not None]
    if known:
        out["conflict_share"] = _mean(b.conflict for b in known)
        out |= _gold_ranks(known)
        decided = Counter(b.behaviour for b in known if b.behaviour)
        out["conflict_episodes"] = float(decided.total())
        out["conflict_left_out"] = float(sum(b.conflict for b in known) - decided.total())
        if decided:
            out |= {name: decided[name] / decided.total() for name in CLASSES}
    for name in ("hop1_prior", "hop1_evidence", "misled"):
        values = [getattr(b, name) for b in judged if getattr(b, name) is not None]
        if values:
            out[name] = _mean(values)
    return out


def _gold_ranks(judged: Sequence[Behaviour]) -> dict[str, float]:
    out = {"gold_shown": _mean(b.gold_rank > 0 for b in judged)}
    for rank in sorted({b.gold_rank for b in judged}):
        ems = [b.em for b in judged if b.gold_rank == rank]
        if rank == 0:
            out["em_gold_not_shown"] = _mean(ems)
        else:
            out[f"em_gold_rank_{rank}"] = _mean(ems)
            out[f"gold_rank_{rank}_share"] = len(ems) / len(judged)
    return out


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([float(value) for value in values]))
