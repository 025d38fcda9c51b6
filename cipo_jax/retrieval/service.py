"""The retrieval service as an ASGI application: Search-R1's and ReSearch's wire formats (extra `serve`)."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.requests import ClientDisconnect

from cipo_jax.retrieval.batching import Batcher, Overloaded
from cipo_jax.retrieval.limits import ServiceLimits
from cipo_jax.retrieval.retriever import Passage, RetrievalError, Retriever

# Bytes beyond the limit that are read and thrown away, so that the client, still sending, lives to read the refusal.
_DISCARDED = 32 << 20


class _Refused(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def create_app(retriever: Retriever, rows: int | None = None, limits: ServiceLimits | None = None) -> FastAPI:
    """Makes the service over a retriever.

    Routes:
      `POST /retrieve {"queries": [..], "topk": k, "return_scores": bool}`, Search-R1.
      `POST /batch_search {"query": [..], "top_n": k, "return_score": bool}` and `POST /search` for one query string,
      ReSearch.
      `GET /health` and `GET /metrics` (Prometheus text).

    Errors are `{"detail": message}`: 400 for a body that is not JSON, 413 for one that is too large, 408 for one that
    comes too slowly, 422 for wrong fields, 502 for a failed search, 503 when too much waits.

    Args:
      retriever: answers queries; called from `limits.workers` threads.
      rows: size of the corpus, shown by `/health`.
      limits: on requests and batches.
    """
    limits = limits or ServiceLimits()
    counts: Counter[tuple[str, int]] = Counter()
    seconds: Counter[str] = Counter()
    state: dict[str, Batcher] = {}

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI):
        state["batcher"] = Batcher(
            retriever, limits.max_batch, limits.max_wait_s, limits.workers, limits.max_pending_queries
        )
        state["batcher"].start()
        yield
        await state["batcher"].stop()

    app = FastAPI(title="cipo_jax retrieval", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def answer(request: Request, handle: Callable[[dict[str, Any]], Any]) -> Response:
        begin = time.monotonic()
        try:
            fields = await _read_json(request, limits)
            response = _json(200, await handle(fields))
        except _Refused as error:
            response = _json(error.status, {"detail": str(error)})
            if error.status in (408, 413):
                response.headers["connection"] = "close"  # the rest of the body may not have been read
        except ClientDisconnect:
            response = _json(499, {"detail": "the client closed the connection"})  # for the count alone
        except Overloaded as error:
            response = _json(503, {"detail": f"overloaded: {error}; try again"})
            response.headers["retry-after"] = "1"
        except RetrievalError as error:
            response = _json(502, {"detail": f"search failed ({error.kind}): {error}"})
        except Exception as error:
            response = _json(502, {"detail": f"search failed: {type(error).__name__}"})
        counts[request.url.path, response.status_code] += 1
        seconds[request.url.path] += time.monotonic() - begin
        return response

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        async def handle(fields: dict[str, Any]) -> Any:
            queries = _queries(fields.get("queries"), "queries", limits)
            top_k = _top_k(fields.get("topk"), "topk", limits)
            scores = _flag(fields.get("return_scores"), "return_scores")
            found = await state["batcher"].retrieve(queries, top_k)
            if scores:
                return {"result": [[{"document": _document(p), "score": p.score} for p in answer] for answer in found]}
            return {"result": [[_document(p) for p in answer] for answer in found]}

        return await answer(request, handle)

    @app.post("/batch_search")
    async def batch_search(request: Request) -> Response:
        async def handle(fields: dict[str, Any]) -> Any:
            queries = _queries(fields.get("query"), "query", limits)
            top_k = _top_k(fields.get("top_n"), "top_n", limits)
            scores = _flag(fields.get("return_score"), "return_score")
            found = await state["batcher"].retrieve(queries, top_k)
            documents = [[_document(p) for p in answer] for answer in found]
            return [documents, [[p.score for p in answer] for answer in found]] if scores else documents

        return await answer(request, handle)

    @app.post("/search")
    async def search(request: Request) -> Response:
        async def handle(fields: dict[str, Any]) -> Any:
            query = fields.get("query")
            queries = _queries([query] if isinstance(query, str) else query, "query", limits)
            if len(queries) != 1:
                raise _Refused(422, "query must be one string")
            top_k = _top_k(fields.get("top_n"), "top_n", limits)
            scores = _flag(fields.get("return_score"), "return_score")
            (found,) = await state["batcher"].retrieve(queries, top_k)
            documents = [_document(p) for p in found]
            return [documents, [p.score for p in found]] if scores else documents

        return await answer(request, handle)

    @app.get("/health")
    async def health() -> Response:
        return _json(200, {"status": "ok", "passages": rows, "pending_queries": state["batcher"].pending})

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        batcher = state["batcher"]
        lines = [
            f'cipo_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(counts.items())
        ]
        lines += [f'cipo_request_seconds_total{{path="{path}"}} {value:.6f}' for path, value in sorted(seconds.items())]
        lines += [
            f"cipo_batches_total {batcher.counts.batches}",
            f"cipo_queries_total {batcher.counts.queries}",
            f"cipo_search_failures_total {batcher.counts.failures}",
            f"cipo_search_seconds_total {batcher.counts.busy_s:.6f}",
            f"cipo_pending_queries {batcher.pending}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    return app


async def _read_json(request: Request, limits: ServiceLimits) -> dict[str, Any]:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            received = 0
            async for part in request.stream():
                received += len(part)
                if received <= limits.max_body_bytes:
                    body += part
                elif received > limits.max_body_bytes + _DISCARDED:
                    break
            if received > limits.max_body_bytes:
                raise _Refused(413, f"the body exceeds {limits.max_body_bytes} bytes")
    except TimeoutError:
        raise _Refused(408, f"the body did not arrive within {limits.body_timeout_s} s") from None
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise _Refused(422, "the body must be a JSON object")
    return fields


def _queries(value: Any, name: str, limits: ServiceLimits) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(query, str) for query in value):
        raise _Refused(422, f"{name} must be a list of strings")
    if len(value) > limits.max_queries:
        raise _Refused(422, f"{name} has {len(value)} entries; at most {limits.max_queries} are allowed")
    return value


def _top_k(value: Any, name: str, limits: ServiceLimits) -> int:
    if value is None:
        return limits.default_top_k
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limits.max_top_k:
        raise _Refused(422, f"{name}={str(value)[:50]} must be an integer from 1 to {limits.max_top_k}")
    return value


def _flag(value: Any, name: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise _Refused(422, f"{name} must be true or false")


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": passage.contents}


def _json(status: int, value: Any) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")  # ASCII: unpaired surrogates are escaped
