"""Answer scores as the open-domain QA literature codes them: exact match, token F1 and cover match.

Published numbers differ on how punctuation is removed, on whether repeated tokens count, and on yes/no answers, so each
of these is an explicit option. One rule is stricter than in public evaluators (our choice): a prediction or gold that
normalises to nothing (`"The"`, `"?"`, `""`) matches nothing.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from cipo_jax.errors import UserError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)
_SPACE = str.maketrans({mark: " " for mark in string.punctuation})
_PUNCTUATION = {"delete": _DELETE, "space": _SPACE}
_CLOSED_QUESTION_WORDS = frozenset({"yes", "no", "noanswer"})


def normalise(text: str, punctuation: str = "delete") -> str:
    """Lower-cases, removes ASCII punctuation and the words a/an/the, and collapses white space.

    Args:
      text: any text.
      punctuation: `"delete"` joins what a mark separated (`1,000` -> `1000`, `U.S.` -> `us`; SQuAD's rule);
        `"space"` separates it (`u s`).

    Returns:
      The normalised text, possibly empty.

    Raises:
      UserError: `punctuation` is neither option.
    """
    if punctuation not in _PUNCTUATION:
        raise UserError(f"punctuation={punctuation!r} is not an option; use 'delete' or 'space'")
    text = text.lower().translate(_PUNCTUATION[punctuation])
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str | None, golds: Sequence[str], punctuation: str = "delete") -> float:
    """1.0 when the normalised prediction equals a normalised gold, else 0.0; no prediction scores 0.0."""
    answer, golds = _normalised(prediction, golds, punctuation)
    return float(bool(answer) and answer in golds)


def token_f1(
    prediction: str | None,
    golds: Sequence[str],
    punctuation: str = "delete",
    tokens: str = "multiset",
    yes_no_guard: bool = False,
) -> float:
    """F1 over white-space tokens of the normalised texts, the best over the golds.

    Args:
      prediction: the answer, or None for none (scores 0).
      golds: gold aliases.
      punctuation: see `normalise`.
      tokens: `"multiset"` counts a repeated token as often as both sides have it (SQuAD); `"set"` counts it once
        (DeepResearcher).
      yes_no_guard: scores 0 against a gold when exactly one side is `yes`, `no` or `noanswer`, or both are and differ
        (HotpotQA's rule; on in FlashRAG and ReSearch).

    Returns:
      A score in [0, 1].

    Raises:
      UserError: an unknown option, or golds given as one string.
    """
    if tokens not in ("multiset", "set"):
        raise UserError(f"tokens={tokens!r} is not an option of token_f1; use 'multiset' or 'set'")
    answer, golds = _normalised(prediction, golds, punctuation)
    if not answer:
        return 0.0
    return max((_f1(answer, gold, tokens, yes_no_guard) for gold in golds), default=0.0)


def cover_match(prediction: str | None, golds: Sequence[str], punctuation: str = "delete") -> float:
    """1.0 when a normalised gold is a substring of the normalised prediction, else 0.0."""
    answer, golds = _normalised(prediction, golds, punctuation)
    return float(any(gold in answer for gold in golds))


def contains_tokens(text: str, gold: str, punctuation: str = "delete") -> bool:
    """Whether the normalised gold occurs in the normalised text on token borders; False for an empty gold."""
    gold = normalise(gold, punctuation)
    return bool(gold) and f" {gold} " in f" {normalise(text, punctuation)} "


def _normalised(prediction: str | None, golds: Sequence[str], punctuation: str) -> tuple[str, list[str]]:
    """Normalises both sides and leaves out golds that normalise to nothing."""
    if isinstance(golds, str):
        raise UserError(f"golds={golds!r} is one string; give a list of answers, such as [{golds!r}]")
    kept = [text for text in (normalise(gold, punctuation) for gold in golds) if text]
    return ("" if prediction is None else normalise(prediction, punctuation)), kept


def _f1(answer: str, gold: str, tokens: str, yes_no_guard: bool) -> float:
    if yes_no_guard and answer != gold and (answer in _CLOSED_QUESTION_WORDS or gold in _CLOSED_QUESTION_WORDS):
        return 0.0
    answer_tokens, gold_tokens = answer.split(), gold.split()
    if tokens == "set":
        answer_tokens, gold_tokens = list(set(answer_tokens)), list(set(gold_tokens))
    common = (Counter(answer_tokens) & Counter(gold_tokens)).total()
    return 2.0 * common / (len(answer_tokens) + len(gold_tokens))
