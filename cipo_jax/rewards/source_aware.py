"""SOAR's reward (arXiv 2610.13157): a right answer, a valid format, and an answer that its declared source supports."""

import re
from collections.abc import Sequence

import gin

from cipo_jax.rewards import scores
from cipo_jax.rewards.blocks import blocks, without_blocks

SOURCES = ("internal", "external")
_STREAM = re.compile(r"^[ \t]*(internal|external):", re.MULTILINE)


@gin.configurable
def source_aware(
    response_text: str,
    answer: str | None,
    golds: Sequence[str],
    format_valid: bool,
    format_weight: float = 0.2,
    match_weight: float = 0.1,
) -> float:
    """`R_ans + format_weight R_fmt + match_weight R_mat`, each in {0, 1}; the weights are applied once.

    Args:
      response_text: all actions and observations.
      answer: the last closed answer or None.
      golds: gold aliases.
      format_valid: the protocol's verdict, `R_fmt`.
      format_weight: the paper's alpha.
      match_weight: the paper's gamma.
    """
    right = scores.exact_match(answer, golds)
    return right + format_weight * bool(format_valid) + match_weight * source_match(response_text, answer)


def source_match(response_text: str, answer: str | None) -> float:
    """`R_mat`: 1.0 when the answer occurs in the stream it was declared to come from.

    It must occur, normalised and on token borders, in the union of all blocks of that stream. No search, no
    declaration, no answer, and the answers yes and no (which match anything) give 0.0: our choices.
    """
    source = declared_source(response_text)
    if source is None or answer is None or scores.normalise(answer) in ("yes", "no"):
        return 0.0
    return float(scores.contains_tokens(stream_text(response_text, source), answer))


def declared_source(response_text: str) -> str | None:
    """`"internal"` or `"external"`, the last `<information_source>` the agent wrote; None if it names neither."""
    declared = blocks(without_blocks(response_text, "information"), "information_source")
    source = declared[-1].lower() if declared else None
    return source if source in SOURCES else None


def stream_text(response_text: str, source: str) -> str:
    """All text of one stream: what follows a line's `internal:` or `external:` in each information block."""
    texts = []
    for block in blocks(response_text, "information"):
        pieces = _STREAM.split(block)
        texts += [text for name, text in zip(pieces[1::2], pieces[2::2]) if name == source]
    return "\n".join(texts)
