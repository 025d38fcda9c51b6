"""The HTTP client retriever: a Search-R1 service, or several, behind the retriever interface."""

import json
import logging
import random
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import gin
import httpx
from absl import logging as absl_logging

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import passage_from_record
from cipo_jax.retrieval.retriever import Passage, RetrievalError

_RETRIED_STATUS = {408, 425, 429}  # besides 5xx
_TOLD_EVERY_S = 60


class _Endpoint:
    """A server and its circuit breaker; the owner's lock guards it."""

    def __init__(self, url: str):
        self.url = url
        self.failures = 0  # in a row
        self.open_until = float("-inf")


@gin.configurable
class HttpRetriever:
    """Asks `POST <endpoint>/retrieve` in Search-R1's wire format.

    Every attempt goes to the next endpoint whose circuit is closed. An endpoint that failed `breaker_failures` times in
    a row is left alone for `breaker_reset_s`, then tried by one request. Failures raise `RetrievalError` with kind
    `connection`, `timeout`, `status`, `malformed` or `circuit_open` and are counted.

    Rows: an id that is a decimal number is the row (wiki-18); any other id gets a stable 31-bit hash.

    Args:
      endpoints: base URLs, such as `http://127.0.0.1:8000`.
      timeout_s: for one attempt, from connecting to the last byte.
      connect_timeout_s: for connecting alone.
      retries: further attempts after the first. Answers 4xx (but 408, 425, 429) are not tried again.
      backoff_s: the n-th retry waits a uniform share of `backoff_s * 2^n` ("full jitter"), at most `max_backoff_s`.
      max_backoff_s: bound of a wait, also of what a server asks for with Retry-After.
      breaker_failures: failures in a row that open an endpoint's circuit.
      breaker_reset_s: how long it stays open.
      max_response_bytes: larger answers are `malformed`.
      remembered: passages kept for `passage(row)`.
      trust_env: use proxies named in the environment.
      must_answer: ask something at once, so that a service that is not there is a `UserError` now and not a failed
        search at every turn of a run.

    Attributes:
      counts: `requests`, `retries`, and failed attempts by kind.
    """

    def __init__(
        self,
        endpoints: Sequence[str] | str = gin.REQUIRED,
        timeout_s: float = 10.0,
        connect_timeout_s: float = 2.0,
        retries: int = 3,
        backoff_s: float = 0.2,
        max_backoff_s: float = 5.0,
        breaker_failures: int = 5,
        breaker_reset_s: float = 10.0,
        max_response_bytes: int = 64 << 20,
        remembered: int = 100_000,
        trust_env: bool = False,
        must_answer: bool = False,
    ):
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        bad = [u for u in urls if not u.startswith(("http://", "https://"))]
        if bad or not urls:
            raise UserError(f"HttpRetriever.endpoints={endpoints!r} must be URLs such as 'http://127.0.0.1:8000'")
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        self._timeout_s, self._retries = timeout_s, retries
        self._backoff_s, self._max_backoff_s = backoff_s, max_backoff_s
        self._breaker_failures, self._breaker_reset_s = breaker_failures, breaker_reset_s
        self._max_response_bytes, self._remembered = max_response_bytes, remembered
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(timeout_s, connect=min(connect_timeout_s, timeout_s))
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request at INFO
        self._client = httpx.Client(timeout=timeout, limits=limits, trust_env=trust_env)
        self._lock = threading.Lock()
        self._jitter = random.Random()  # waits are not part of a run's results
        self._next = 0
        self._seen: OrderedDict[int, Passage] = OrderedDict()
        self.counts: Counter[str] = Counter()
        if must_answer:
            self._ask_once()

    def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        if not queries or top_k < 1:
            return [[] for _ in queries]
        try:
            return self._retrieve(queries, top_k)
        except RetrievalError as error:
            warning = "a search failed (%s): %s; all are counted, this is told at most once in %d s"
            absl_logging.log_every_n_seconds(
                absl_logging.WARNING, warning, _TOLD_EVERY_S, error.kind, error, _TOLD_EVERY_S
            )
            raise

    def passage(self, row: int) -> Passage:
        """Returns a passage that an earlier search showed; `IndexError` when none of those kept has this row."""
        with self._lock:
            if row not in self._seen:
                raise IndexError(f"row {row} was not among the last {self._remembered} passages retrieved")
            return self._seen[row]

    def close(self) -> None:
        self._client.close()

    def _retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        clean = [query.encode("utf-8", "replace").decode() for query in queries]
        body = json.dumps({"queries": clean, "topk": top_k, "return_scores": True}).encode()
        for attempt in range(self._retries + 1):
            endpoint = self._choose()
            try:
                answer = parse_answer(self._post(endpoint.url, body), len(queries), top_k)
            except _Failure as failure:
                self._record(endpoint, failure)
                if not failure.retry or attempt == self._retries:
                    raise RetrievalError(f"{endpoint.url}: {failure}", failure.kind) from None
                self._wait(attempt, failure.retry_after)
            else:
                self._record(endpoint, None)
                self._remember(answer)
                return answer
        raise AssertionError("unreachable")

    def _ask_once(self) -> None:
        try:
            self._retrieve(["warm up"], 1)
        except RetrievalError as error:
            raise UserError(
                f"the retrieval service does not answer ({error}); start it (python -m cipo_jax.serve_index), wait until "
                "it says that it serves, or mend HttpRetriever.endpoints"
            ) from None
        self.counts.clear()

    def _choose(self) -> _Endpoint:
        now = time.monotonic()
        with self._lock:
            for step in range(len(self._endpoints)):
                endpoint = self._endpoints[(self._next + step) % len(self._endpoints)]
                if endpoint.open_until <= now:
                    self._next = (self._next + step + 1) % len(self._endpoints)
                    if endpoint.failures >= self._breaker_failures:
                        endpoint.open_until = now + self._breaker_reset_s  # half open: others wait for this attempt
                    return endpoint
            self.counts["circuit_open"] += 1
            wait = min(e.open_until for e in self._endpoints) - now
        raise RetrievalError(f"all {len(self._endpoints)} endpoints failed; next try in {wait:.1f} s", "circuit_open")

    def _record(self, endpoint: _Endpoint, failure: "_Failure | None") -> None:
        with self._lock:
            self.counts["requests"] += 1
            if failure is not None:
                self.counts[failure.kind] += 1
            if failure is None or not failure.retry:  # a refusal is the answer of a live server
                endpoint.failures, endpoint.open_until = 0, float("-inf")
            else:
                endpoint.failures += 1
                if endpoint.failures >= self._breaker_failures:
                    endpoint.open_until = time.monotonic() + self._breaker_reset_s

    def _wait(self, attempt: int, asked: float) -> None:
        with self._lock:
            self.counts["retries"] += 1
            share = self._jitter.random()
        time.sleep(min(max(share * self._backoff_s * 2**attempt, asked), self._max_backoff_s))

    def _post(self, url: str, body: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._client.stream(
                "POST", f"{url}/retrieve", content=body, headers={"content-type": "application/json"}
            ) as response:
                if response.status_code != 200:
                    retry = response.status_code >= 500 or response.status_code in _RETRIED_STATUS
                    asked = response.headers.get("retry-after", "")
                    after = float(asked) if asked.isdigit() else 0.0
                    raise _Failure(f"status {response.status_code}", "status", retry, after)
                data = bytearray()
                for part in response.iter_bytes():  # httpx bounds each read; the deadline bounds their sum
                    data += part
                    if time.monotonic() > deadline:
                        raise _Failure(f"no complete answer within {self._timeout_s} s", "timeout")
                    if len(data) > self._max_response_bytes:
                        raise _Failure(f"answer exceeds {self._max_response_bytes} bytes", "malformed")
                return bytes(data)
        except httpx.TimeoutException:
            raise _Failure(f"no complete answer within {self._timeout_s} s", "timeout") from None
        except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
            raise _Failure(f"broken HTTP ({error})", "malformed") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _Failure(f"no connection ({error})", "connection") from None

    def _remember(self, answers: list[list[Passage]]) -> None:
        with self._lock:
            for passage in (p for answer in answers for p in answer):
                self._seen[passage.row] = passage
                self._seen.move_to_end(passage.row)
            while len(self._seen) > self._remembered:
                self._seen.popitem(last=False)


class _Failure(Exception):
    def __init__(self, message: str, kind: str, retry: bool = True, retry_after: float = 0.0):
        super().__init__(message)
        self.kind, self.retry, self.retry_after = kind, retry, retry_after


def row_of(identifier: str) -> int:
    """The row that an id stands for: the number it is, if below 2^31, or else its CRC-32 without the sign bit."""
    if identifier.isascii() and identifier.isdecimal() and len(identifier) <= 10 and int(identifier) < 2**31:
        return int(identifier)
    return zlib.crc32(identifier.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


def parse_answer(data: bytes, queries: int, top_k: int) -> list[list[Passage]]:
    """Reads `{"result": [[{"document": {...}, "score": s}, ...], ...]}`, with or without scores.

    Raises a `malformed` failure for anything else, and for more or fewer lists than queries. A list longer than `top_k`
    is cut.
    """
    try:
        result = json.loads(data)["result"]
        if not isinstance(result, list) or len(result) != queries:
            raise ValueError(f"{queries} result lists were expected")
        return [[_passage(item) for item in items[:top_k]] for items in result]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Failure(f"the answer is not Search-R1's JSON ({error!r}): {data[:80]!r}", "malformed") from None


def _passage(item: Any) -> Passage:
    document, score = (item["document"], float(item["score"])) if "document" in item else (item, 0.0)
    read = passage_from_record(document, 0)
    return Passage(row_of(read.id), read.id, read.title, read.text, score)
