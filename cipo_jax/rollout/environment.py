"""The host's side of a rollout: reads queries, asks the retriever, writes observations as token ids."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from cipo_jax.data.questions import Question
from cipo_jax.protocols.base import INVALID_ACTION, RETRIEVAL_FAILED, ActionKind, Observation, Protocol
from cipo_jax.retrieval.retriever import Passage, RetrievalError, Retriever
from cipo_jax.rollout.host import SearchDesk

# What a call wants of a search under way: nothing yet; its answer if it is there; a short wait until any such answer is
# there; all such answers, which are worth waiting for.
LEAVE, TAKE, AWAIT_ANY, AWAIT_ALL = range(4)

# No call blocks longer, the program calls again: with several simulated devices a long block aborts the process.
WAIT_S = 1.0
IDLE_WAIT_S = 0.02  # other shards may have something to do meanwhile

COUNTS = (
    "host_calls",  # calls out of the rollout program
    "queries",  # searches handed to the retrievers
    "invalid_actions",  # actions with neither a search nor an answer
    "retrieval_errors",  # searches that failed, whatever the reason
    "retrieval_timeouts",  # those of them that took too long
    "retrieval_seconds",  # in calls out of the program
    "retrieval_wait_seconds",  # of them spent waiting for answers
    "retrieval_busy_seconds",  # in retrievers, on threads beside the program
)


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
      retrievers: by corpus name (`Question.corpus`); called from several threads.
      top_k: passages per search.
      observation_tokens: budget of one observation.
      timeout_s: a search that takes longer has failed.
      workers: calls of retrievers at once.
    """

    def __init__(
        self,
        protocol: Protocol,
        retrievers: Mapping[str, Retriever],
        top_k: int,
        observation_tokens: int,
        timeout_s: float = 60.0,
        workers: int = 4,
    ):
        self.protocol, self.retrievers, self.top_k = protocol, retrievers, top_k
        self.layout = ReplyLayout(observation_tokens, top_k)
        self._desk = SearchDesk(self._retrieve, timeout_s, workers)
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
        self._desk.clear()

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call; see `COUNTS`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        if counts["retrieval_timeouts"]:
            logging.warning(
                "%d searches timed out: this rollout cannot be repeated bit for bit", counts["retrieval_timeouts"]
            )
        return {name: float(counts[name]) for name in COUNTS}

    def exchange(self, new, row, tail, tail_count, budget, ticket, want) -> np.ndarray:
        """The host callback: hands searches in and answers out. Never raises: failures become observations and counts.

        Args:
          new: `[s]` bool, rows whose action has just ended.
          row: `[s]` int32, number of the row in the batch.
          tail: `[s, Q]` int32, the last ids of the action, `tail_count` of them.
          tail_count: `[s]` int32.
          budget: `[s]` int32, tokens an observation may take.
          ticket: `[s]` int32, positive for rows with a search under way.
          want: `[s]` int32, what is wanted of a row's search: `LEAVE`, `TAKE`, `AWAIT_ANY` or `AWAIT_ALL`.

        Returns:
          `[s, 1 + layout.width]` int32: the ticket of a search that is still under way, else 0; and the observation, which
          is left empty if it does not fit.
        """
        started = time.perf_counter()
        operands = [np.asarray(x) for x in (new, row, tail, tail_count, budget, ticket, want)]
        counts: Counter[str] = Counter(host_calls=1)
        try:
            out = self._exchange(counts, *operands)
        except Exception:
            logging.exception("a host call of the rollout failed")
            out = self._empty(len(operands[0]))
            for i in np.flatnonzero(operands[0] | (operands[5] > 0)):
                self._write(out[i], self.protocol.correction(RETRIEVAL_FAILED), int(operands[4][i]))
                counts["retrieval_errors"] += 1
        counts["retrieval_seconds"] += time.perf_counter() - started
        self._count(counts)
        return out

    def _exchange(self, counts, new, row, tail, tail_count, budget, ticket, want) -> np.ndarray:
        out, ticket = self._empty(len(new)), ticket.copy()
        asked: list[tuple[int, str, str]] = []
        for i in np.flatnonzero(new):
            action = self._parse(tail[i, : tail_count[i]])
            if action is not None and action.kind is ActionKind.SEARCH:
                asked.append((int(i), self._questions[row[i]].corpus, action.query))
            else:
                counts["invalid_actions"] += 1
                self._write(out[i], self.protocol.correction(INVALID_ACTION), int(budget[i]))
        counts["queries"] += len(asked)
        for (i, *_), number in zip(asked, self._desk.submit([(corpus, query) for _, corpus, query in asked])):
            ticket[i] = number
        started = time.perf_counter()
        for kind, seconds in ((AWAIT_ALL, WAIT_S), (AWAIT_ANY, IDLE_WAIT_S)):
            self._desk.wait(ticket[(ticket > 0) & (want == kind)].tolist(), seconds, every=kind == AWAIT_ALL)
        counts["retrieval_wait_seconds"] += time.perf_counter() - started
        for i in np.flatnonzero((ticket > 0) & (want != LEAVE)):
            taken = self._desk.take(int(ticket[i]))
            if taken is not None:
                self._write(out[i], self._observe(*taken, int(budget[i]), counts), int(budget[i]))
                ticket[i] = 0
        out[:, 0] = ticket
        return out

    def _empty(self, rows: int) -> np.ndarray:
        out = np.zeros((rows, 1 + self.layout.width), np.int32)
        K = self.layout.passages
        out[:, 4 + 2 * K : 4 + 3 * K] = -1
        return out

    def _write(self, out: np.ndarray, observation: Observation, budget: int) -> None:
        if len(observation.ids) <= budget:
            self.layout.write(out[1:], observation)

    def _count(self, counts: Mapping[str, float]) -> None:
        with self._lock:
            self._counts.update(counts)

    def _parse(self, ids: np.ndarray):
        try:
            return self.protocol.parse_action(self.protocol.tokenizer.decode(ids.tolist()))
        except Exception:  # an action that cannot even be read is an invalid one
            return None

    def _retrieve(self, corpus: str, queries: list[str]) -> Sequence[list[Passage] | None]:
        """On a worker's thread."""
        started = time.perf_counter()
        try:
            found = self.retrievers[corpus].retrieve(queries, self.top_k)
            if len(found) != len(queries):
                raise RetrievalError(f"{len(queries)} queries got {len(found)} answers")
            return [list(passages)[: self.top_k] for passages in found]
        except Exception as error:  # whatever a retriever throws, the run goes on
            logging.log_first_n(logging.WARNING, "a search in %r failed: %r", 3, corpus, error)
            return [None] * len(queries)
        finally:
            self._count({"retrieval_busy_seconds": time.perf_counter() - started})

    def _observe(self, timed_out: bool, passages: list[Passage] | None, budget: int, counts: Counter) -> Observation:
        try:
            if passages is not None:
                return self.protocol.observe(passages, min(budget, self.layout.observation_tokens))
        except Exception as error:  # a passage that cannot be rendered
            logging.log_first_n(logging.WARNING, "an answer cannot be written as an observation: %r", 3, error)
        counts["retrieval_errors"] += 1
        counts["retrieval_timeouts"] += timed_out
        return self.protocol.correction(RETRIEVAL_FAILED)
