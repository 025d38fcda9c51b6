"""The host's side of a rollout: reads queries, asks the retriever, writes observations as token ids."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from cipo_jax.data.questions import Question
from cipo_jax.protocols.base import INVALID_ACTION, RETRIEVAL_FAILED, ActionKind, Observation, Protocol
from cipo_jax.retrieval.retriever import Passage, RetrievalError, Retriever


@dataclasses.dataclass(frozen=True)
class ReplyLayout:
    """How one observation is written into a row of int32: count, content span, passage spans, passage rows, ids."""

    observation_tokens: int
    passages: int

    @property
    def width(self) -> int:
        """Integers per row."""
        return 3 + 3 * self.passages + self.observation_tokens

    def write(self, row: np.ndarray, observation: Observation) -> None:
        """Fills one row of a reply."""
        K = self.passages
        row[0], row[1:3] = len(observation.ids), observation.content
        for k, (span, passage) in enumerate(zip(observation.passages, observation.rows)):
            row[3 + 2 * k : 5 + 2 * k] = span
            row[3 + 2 * K + k] = passage
        row[3 + 3 * K : 3 + 3 * K + len(observation.ids)] = observation.ids

    def read(self, reply_SW):
        """`(count [S], content [S, 2], spans [S, K, 2], rows [S, K], ids [S, O])` of a reply, on the device."""
        K = self.passages
        spans = reply_SW[:, 3 : 3 + 2 * K].reshape(-1, K, 2)
        return reply_SW[:, 0], reply_SW[:, 1:3], spans, reply_SW[:, 3 + 2 * K : 3 + 3 * K], reply_SW[:, 3 + 3 * K :]


class Environment:
    """Answers the searches of a batch of trajectories.

    Args:
      protocol: reads actions and writes observations.
      retrievers: by corpus name (`Question.corpus`).
      top_k: passages per search.
      observation_tokens: budget of one observation.
    """

    def __init__(self, protocol: Protocol, retrievers: Mapping[str, Retriever], top_k: int, observation_tokens: int):
        self.protocol, self.retrievers, self.top_k = protocol, retrievers, top_k
        self.layout = ReplyLayout(observation_tokens, top_k)
        self._questions: Sequence[Question] = ()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def begin(self, questions: Sequence[Question]) -> None:
        """Sets the question of each row of the next rollout.

        Raises:
          KeyError: a question names a corpus that has no retriever.
        """
        missing = {q.corpus for q in questions} - set(self.retrievers)
        if missing:
            raise KeyError(
                f"no retriever for the corpora {sorted(missing)}; there are {sorted(self.retrievers)[:8]} ..."
            )
        self._questions = questions

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call: `host_calls`, `queries`, `invalid_actions`, `retrieval_errors`,
        `retrieval_seconds`."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
        names = ("host_calls", "queries", "invalid_actions", "retrieval_errors", "retrieval_seconds")
        return {name: float(counts.get(name, 0)) for name in names}

    def reply(self, ended, row, tail, tail_count, budget) -> np.ndarray:
        """The host callback. Never raises: a failure becomes a protocol observation and a count.

        Args:
          ended: `[s]` int32, 1 for an action that ended at a search, 2 for one without a call, 0 for rows that ask
            nothing.
          row: `[s]` int32, number of the row in the batch.
          tail: `[s, Q]` int32, the last ids of the action, `tail_count` of them.
          tail_count: `[s]` int32.
          budget: `[s]` int32, tokens an observation may take.

        Returns:
          `[s, layout.width]` int32.
        """
        started = time.perf_counter()
        ended, row, tail, tail_count, budget = (np.asarray(x) for x in (ended, row, tail, tail_count, budget))
        out = np.zeros((len(ended), self.layout.width), np.int32)
        K = self.layout.passages
        out[:, 3 + 2 * K : 3 + 3 * K] = -1
        counts: Counter[str] = Counter(host_calls=1)
        wanted: dict[str, list[tuple[int, str]]] = {}
        observations: dict[int, Observation] = {}
        for i in np.flatnonzero(ended):
            action = self._parse(tail[i, : tail_count[i]]) if ended[i] == 1 else None
            if action is not None and action.kind is ActionKind.SEARCH:
                wanted.setdefault(self._questions[row[i]].corpus, []).append((int(i), action.query))
            else:
                counts["invalid_actions"] += 1
                observations[int(i)] = self.protocol.correction(INVALID_ACTION)
        for corpus, asked in wanted.items():
            counts["queries"] += len(asked)
            found = self._retrieve(corpus, [query for _, query in asked])
            for (i, _), passages in zip(asked, found or [None] * len(asked)):
                observations[i] = self._observe(passages, int(budget[i]))
                counts["retrieval_errors"] += passages is None
        for i, observation in observations.items():
            if len(observation.ids) <= budget[i]:
                self.layout.write(out[i], observation)
        counts["retrieval_seconds"] += time.perf_counter() - started
        with self._lock:
            self._counts.update(counts)
        return out

    def _parse(self, ids: np.ndarray):
        try:
            return self.protocol.parse_action(self.protocol.tokenizer.decode(ids.tolist()))
        except Exception:  # an action that cannot even be read is an invalid one
            return None

    def _retrieve(self, corpus: str, queries: list[str]) -> list[list[Passage]] | None:
        try:
            found = self.retrievers[corpus].retrieve(queries, self.top_k)
            if len(found) != len(queries):
                raise RetrievalError(f"{len(queries)} queries got {len(found)} answers")
            return [list(passages)[: self.top_k] for passages in found]
        except Exception:  # whatever a retriever throws, the run goes on
            return None

    def _observe(self, passages: list[Passage] | None, budget: int) -> Observation:
        if passages is None:
            return self.protocol.correction(RETRIEVAL_FAILED)
        try:
            return self.protocol.observe(passages, min(budget, self.layout.observation_tokens))
        except Exception:  # a passage that cannot be rendered
            return self.protocol.correction(RETRIEVAL_FAILED)
