"""Outcome rewards of other published search agents, as their authors coded them; signature as in `outcome.py`.

Each reads the tags of its own paper's prompt; tags are parameters, so that a reward also runs under another protocol.
What "format valid" means is the protocol's business.
"""

from collections.abc import Sequence

import gin

from cipo_jax.errors import UserError
from cipo_jax.rewards import scores
from cipo_jax.rewards.blocks import blocks, without_blocks


@gin.configurable
def search_r1_structured(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    structure: float = 0.2,
    final_format: float = 0.1,
    retrieval: float = 0.0,
    evidence_tag: str = "information",
) -> float:
    """Search-R1 v0.3 (PeterGriffinJin/Search-R1): exact match with credit for structure, format and retrieval.

    | | valid | invalid |
    |---|---|---|
    | exact match | 1 | 1 - structure |
    | wrong, gold retrieved | structure + retrieval | final_format |
    | wrong | structure | final_format |
    | no answer, gold retrieved | structure + retrieval | 0 |
    | no answer | structure | 0 |

    Args:
      response_text: all actions and observations.
      answer: the last closed answer or None.
      golds: gold aliases.
      format_valid: the protocol's verdict.
      structure: see the table; 0.2 in the authors' scripts.
      final_format: see the table; 0.1 there.
      retrieval: see the table; 0 there, 0.1 in the paper's variant.
      evidence_tag: tag of the observations in which a gold counts as retrieved (a normalised substring).
    """
    if scores.exact_match(answer, golds):
        return 1.0 if format_valid else 1.0 - structure
    if not format_valid:
        return 0.0 if answer is None else final_format
    retrieved = " ".join(blocks(response_text, evidence_tag))
    return structure + retrieval * scores.cover_match(retrieved, golds)


@gin.configurable
def research(response_text: str, answer: str | None, golds: Sequence[str], format_valid: bool) -> float:
    """ReSearch (Agent-RL/ReCall): 0 for an invalid format, else F1 with the yes/no guard when positive, else 0.1."""
    del response_text
    if not format_valid:
        return 0.0
    return scores.token_f1(answer, golds, yes_no_guard=True) or 0.1


@gin.configurable
def r1_searcher(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    stage: int = 2,
    fault: float = -1.0,
    max_answer_words: int | None = None,
    search_tag: str = "search",
) -> float:
    """R1-Searcher (RUCAIBox). Stage 1: 0.5 for a search plus 0.5 for the format. Stage 2: F1, or `fault`.

    Args:
      response_text: all actions and observations.
      answer: the last closed answer or None; `True` and `False` are read as yes and no.
      golds: gold aliases.
      format_valid: the protocol's verdict.
      stage: 1 or 2.
      fault: reward in stage 2 of an invalid format or a missing answer (the variant: -2).
      max_answer_words: a longer answer is a fault (the variant: 10); None for any length.
      search_tag: tag of a search call.

    Raises:
      UserError: another stage.
    """
    if stage == 1:
        return 0.5 * bool(blocks(response_text, search_tag)) + 0.5 * bool(format_valid)
    if stage != 2:
        raise UserError(f"r1_searcher.stage={stage} is not an option; use 1 or 2")
    if not format_valid or answer is None:
        return fault
    if max_answer_words is not None and len(answer.split()) > max_answer_words:
        return fault
    answer = {"true": "yes", "false": "no"}.get(scores.normalise(answer, "space"), answer)
    return scores.token_f1(answer, golds, "space")


@gin.configurable
def deepresearcher(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    fault: float = -1.0,
    evidence_tag: str = "information",
) -> float:
    """DeepResearcher: F1 over token sets of the *first* answer outside observations, or `fault` without a valid one."""
    answers = blocks(without_blocks(response_text, evidence_tag), "answer")
    if not format_valid or answer is None or not answers:
        return fault
    return scores.token_f1(answers[0], golds, "space", "set")


@gin.configurable
def autorefine(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    refine_reward: float = 0.1,
    refine_tag: str = "refine",
) -> float:
    """AutoRefine: F1 when positive, else `refine_reward` if a gold occurs in a refine block; 0 without an answer."""
    del format_valid
    if answer is None:
        return 0.0
    if score := scores.token_f1(answer, golds):
        return score
    return refine_reward * scores.cover_match(" ".join(blocks(response_text, refine_tag)), golds)


@gin.configurable
def ikea(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    bonus: Sequence[float] = (0.6, 0.4, 0.2, 0.0),
    wrong_searched: float = 0.05,
    invalid: float = -1.0,
    search_tag: str = "search",
) -> float:
    """IKEA: a right answer gets 1 plus a bonus for few searches, a wrong one a little if it searched.

    Args:
      response_text: all actions and observations.
      answer: the last closed answer or None.
      golds: gold aliases.
      format_valid: the protocol's verdict.
      bonus: of a right answer after 0, 1, 2, .. searches; the last holds for more.
      wrong_searched: reward of a wrong answer after at least one search.
      invalid: reward of an invalid format or a missing answer.
      search_tag: tag of a search call.
    """
    if not format_valid or answer is None:
        return invalid
    searches = len(blocks(response_text, search_tag))
    if scores.exact_match(answer, golds):
        return 1.0 + bonus[min(searches, len(bonus) - 1)]
    return wrong_searched if searches else 0.0
