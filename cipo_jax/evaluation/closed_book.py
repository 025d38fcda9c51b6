"""What the policy remembers: questions on the memory world, answered with nothing retrieved.

Two ways to ask, both through the rollout's own program:

- `NoPassages` (default): searches come back empty. The agent talks as it does otherwise, and what it answers it
  remembered. Register it as the retriever of corpus `CLOSED_BOOK`.
- `AnswerFirst`: the prompt ends inside the answer, so that the agent cannot search at all.
"""

import dataclasses
from collections.abc import Sequence

from cipo_jax.data.names import COUNTRIES, RELATIONS
from cipo_jax.data.questions import Question
from cipo_jax.data.splits import AGREE
from cipo_jax.data.world import QUESTIONS, World
from cipo_jax.evaluation.statistics import Estimate, wilson
from cipo_jax.protocols.base import Action, Observation, Protocol
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.rewards.scores import exact_match
from cipo_jax.rollout.episode import Episode

CLOSED_BOOK = "closed_book"  # corpus of closed-book questions


class NoPassages:
    """A retriever that finds nothing."""

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """One empty list per query."""
        return [[] for _ in queries]

    def passage(self, row: int) -> Passage:
        """Raises `IndexError`."""
        raise IndexError(f"row {row} is outside an empty corpus")


class AnswerFirst(Protocol):
    """A protocol whose agent starts inside its answer.

    Args:
      protocol: the protocol to wrap; stop strings and observations stay.
      opening: what the prompt ends with. It belongs to the first action when that is read.
    """

    def __init__(self, protocol: Protocol, opening: str = "<answer>"):
        self.protocol, self.opening = protocol, opening
        self.tokenizer = protocol.tokenizer
        self.stop_strings, self.terminal_stops = protocol.stop_strings, protocol.terminal_stops
        self.end_of_turn_ids = protocol.end_of_turn_ids
        self.corrects_invalid = False  # there is one action
        self.encode, self.encode_action, self.neutralise = protocol.encode, protocol.encode_action, protocol.neutralise

    def prompt_ids(self, question: str) -> list[int]:
        """The wrapped prompt, then the opening."""
        return self.protocol.prompt_ids(question) + self.protocol.encode(self.opening)

    def parse_action(self, text: str) -> Action:
        """Reads the opening and the text as one action."""
        return self.protocol.parse_action(self.opening + text)

    def observe(self, passages: Sequence[Passage], budget: int) -> Observation:
        """As the wrapped protocol."""
        return self.protocol.observe(passages, budget)

    def correction(self, reason: str) -> Observation:
        """As the wrapped protocol."""
        return self.protocol.correction(reason)

    def final_answer(self, text: str) -> str | None:
        """The last closed answer of the opening and the response."""
        return self.protocol.final_answer(self.opening + text)

    def format_valid(self, text: str) -> bool:
        """Whether the opening and the response together follow the wrapped grammar."""
        return self.protocol.format_valid(self.opening + text)


def closed_book_questions(memory: World, countries: Sequence[str] = COUNTRIES) -> tuple[Question, ...]:
    """Every two-hop question on the memory world, in corpus `CLOSED_BOOK`; gold is the memory's answer.

    Args:
      memory: `SyntheticTask.memory()`.
      countries: whom to ask about; e.g. `SyntheticTask.heldout`.
    """
    questions = []
    for country in countries:
        for relation in RELATIONS:
            capital, gold = memory.capitals[country], memory.answer(country, relation)
            meta = {"country": country, "relation": relation, "capital": capital, "gold": gold}
            meta |= {"stratum": AGREE, "split": CLOSED_BOOK}
            text = QUESTIONS[relation].format(country=country)
            questions.append(Question(f"{CLOSED_BOOK}/{country}/{relation}", text, (gold,), CLOSED_BOOK, meta))
    return tuple(questions)


@dataclasses.dataclass(frozen=True)
class ClosedBook:
    """Closed-book scores.

    Attributes:
      em: exact match with the memory's answer.
      valid_answer: share with a closed, non-empty answer: a low one says that the agent could not be asked this way.
    """

    em: Estimate
    valid_answer: float


def score_closed_book(episodes: Sequence[Episode]) -> ClosedBook:
    """Scores the episodes of `closed_book_questions`.

    Raises:
      ValueError: if an episode saw a passage.
    """
    if any(episode.searches for episode in episodes):
        raise ValueError("a closed-book episode saw passages; give corpus 'closed_book' the retriever NoPassages")
    hits = [exact_match(episode.answer, episode.question.golds) for episode in episodes]
    valid = [bool((episode.answer or "").strip()) for episode in episodes]
    n = len(episodes)
    return ClosedBook(wilson(sum(hits) / n if n else 0.0, n), sum(valid) / n if n else 0.0)
