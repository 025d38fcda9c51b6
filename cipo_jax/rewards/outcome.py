"""Outcome rewards: one number for the final answer of a trajectory.

Every reward function of this package has one signature, so that gin can swap them and a new one is a new file:
`(response_text, answer, golds, format_valid) -> float`. `response_text` holds all actions and observations,
`answer` is the last closed answer (None when there is none) and `format_valid` is the protocol's verdict.
"""

from collections.abc import Sequence

import gin

from cipo_jax.rewards import scores


@gin.configurable
def em(
    response_text: str, answer: str | None, golds: Sequence[str], format_valid: bool, punctuation: str = "delete"
) -> float:
    """Exact match of the final answer, 0 without one (arXiv 2609.28765, "EM only")."""
    del response_text, format_valid
    return scores.exact_match(answer, golds, punctuation)


@gin.configurable
def f1(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    punctuation: str = "delete",
    tokens: str = "multiset",
    yes_no_guard: bool = False,
) -> float:
    """Token F1 of the final answer, 0 without one (arXiv 2609.28765, "F1"; the default outcome of CIPO, our choice)."""
    del response_text, format_valid
    return scores.token_f1(answer, golds, punctuation, tokens, yes_no_guard)


@gin.configurable
def f1_format(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    format_floor: float = 0.1,
    format_gates_f1: bool = False,
    punctuation: str = "delete",
    tokens: str = "multiset",
    yes_no_guard: bool = False,
) -> float:
    """F1 when positive, else a floor for a valid format, else 0 (arXiv 2609.28765, "F1+format").

    Args:
      response_text: unused.
      answer: the last closed answer or None.
      golds: gold aliases.
      format_valid: the protocol's verdict on the whole response.
      format_floor: reward of a well-formed response whose F1 is 0; a positive F1 stays as it is.
      format_gates_f1: give 0 to every invalid format even when F1 is positive, as the authors' released code does.
        False follows the paper.
      punctuation: see `scores.normalise`.
      tokens: see `scores.token_f1`.
      yes_no_guard: see `scores.token_f1`.

    Returns:
      A reward in [0, 1].
    """
    del response_text
    if format_gates_f1 and not format_valid:
        return 0.0
    score = scores.token_f1(answer, golds, punctuation, tokens, yes_no_guard)
    if score > 0.0:
        return score
    return format_floor if format_valid else 0.0
