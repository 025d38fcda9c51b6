"""The HTTP service on a real socket: wire formats, hostile requests, batching, shutdown."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("fastapi", reason="needs the extra `serve`")

from cipo_jax.errors import UserError  # noqa: E402
from cipo_jax.retrieval.corpus import ListCorpus  # noqa: E402
from cipo_jax.retrieval.dense import sparse_retriever  # noqa: E402
from cipo_jax.retrieval.http import HttpRetriever  # noqa: E402
from cipo_jax.retrieval.limits import ServiceLimits  # noqa: E402
from cipo_jax.retrieval.retriever import RetrievalError  # noqa: E402
from cipo_jax.retrieval.serve import serve_index  # noqa: E402
from cipo_jax.retrieval.service import create_app  # noqa: E402

CORPUS = ListCorpus(
    {
        "id": f"p{i}",
        "title": f"T{i}",
        "text": f"word{i} lies in land{i // 2}. \udce9" if i == 7 else f"word{i} land{i // 2}",
    }
    for i in range(40)
)
LIMITS = ServiceLimits(
    max_body_bytes=100_000, body_timeout_s=0.5, max_queries=50, max_top_k=20, max_pending_queries=300
)


class Slow:
    """A retriever with injected latency per call, that remembers the size of each call."""

    def __init__(self, seconds=0.0):
        self.inner, self.seconds, self.sizes = sparse_retriever(CORPUS), seconds, []

    def retrieve(self, queries, top_k):
        self.sizes.append(len(queries))
        time.sleep(self.seconds)
        if "poison" in queries:
            raise ValueError("secret path /etc")
        if "unavailable" in queries:
            raise RetrievalError("upstream", "timeout")
        return self.inner.retrieve(queries, top_k)

    def passage(self, row):
        return CORPUS.passage(row)


@contextlib.contextmanager
def running(retriever, limits=LIMITS):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(retriever, len(CORPUS), limits), log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20, trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        ) as client:  # fmt: skip
            yield client
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def service():
    with running(Slow()) as client:
        yield client


def test_search_r1_wire_format(service):
    """methods.md section 6, scores on and off."""
    asked = {"queries": ["word4 land2", "word9"], "topk": 2, "return_scores": True}
    answer = service.post("/retrieve", json=asked).json()
    assert list(answer) == ["result"] and [len(items) for items in answer["result"]] == [2, 2]
    first = answer["result"][0][0]
    assert first["document"] == {"id": "p4", "contents": '"T4"\nword4 land2'}
    assert set(first) == {"document", "score"} and isinstance(first["score"], float)
    assert first["score"] >= answer["result"][0][1]["score"]
    plain = service.post("/retrieve", json={**asked, "return_scores": False}).json()
    assert plain == {"result": [[item["document"] for item in items] for items in answer["result"]]}
    assert service.post("/retrieve", json={"queries": ["word4"]}).json()["result"][0][0]["id"] == "p4"
    assert len(service.post("/retrieve", json={"queries": ["word4"], "topk": None}).json()["result"][0]) == 3
    assert service.post("/retrieve", json={"queries": []}).json() == {"result": []}


def test_research_wire_format(service):
    asked = {"query": ["word4 land2", "word9"], "top_n": 2}
    plain = service.post("/batch_search", json=asked).json()
    assert plain[0][0] == {"id": "p4", "contents": '"T4"\nword4 land2'} and [len(p) for p in plain] == [2, 2]
    documents, scores = service.post("/batch_search", json={**asked, "return_score": True}).json()
    assert documents == plain and [len(s) for s in scores] == [2, 2] and scores[0][0] >= scores[0][1]
    assert service.post("/search", json={"query": "word4 land2", "top_n": 2}).json() == plain[0]
    one = service.post("/search", json={"query": "word4 land2", "top_n": 2, "return_score": True}).json()
    assert one == [plain[0], scores[0]]


def test_answers_equal_the_retriever_through_the_client(service):
    queries = [f"word{i} land{i // 2}" for i in range(40)]
    client = HttpRetriever(str(service.base_url))
    remote, local = client.retrieve(queries, 3), sparse_retriever(CORPUS).retrieve(queries, 3)
    assert [[(p.id, p.title, p.text, p.score) for p in f] for f in remote] == [
        [(p.id, p.title, p.text, p.score) for p in f] for f in local
    ]


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400), (b"{", 400), (b"not json", 400), (b"\xff\xfe", 400), (b"[" * 50_000, 400), (b"[1]", 422),
        (b"null", 422), (b"{}", 422), (b'{"queries": "word1"}', 422), (b'{"queries": [1]}', 422),
        (b'{"queries": ["a"], "topk": 1000000}', 422), (b'{"queries": ["a"], "topk": 0}', 422),
        (b'{"queries": ["a"], "topk": -1}', 422), (b'{"queries": ["a"], "topk": "3"}', 422),
        (b'{"queries": ["a"], "topk": 1e3}', 422), (b'{"queries": ["a"], "topk": true}', 422),
        (b'{"queries": ["a"], "topk": 9' + b"9" * 4000 + b"}", 422), (b'{"queries": ["a"], "return_scores": 1}', 422),
        (json.dumps({"queries": ["a"] * 51}).encode(), 422), (b'{"queries": ["' + b"x" * 100_000 + b'"]}', 413),
        (b'{"queries": ["\\ud800"]}', 200), (b'{"queries": ["\\u0000", ""]}', 200),
        (json.dumps({"queries": ["x" * 10_000]}).encode(), 200), (b'{"queries": ["word7"], "unknown": 1}', 200),
    ],
)  # fmt: skip
def test_hostile_bodies(service, body, status):
    response = service.post("/retrieve", content=body)
    assert response.status_code == status
    assert len(response.content) < 5000
    key = "result" if status == 200 else "detail"
    assert list(response.json()) == [key]


def test_unknown_routes(service):
    assert service.get("/retrieve").status_code == 405
    assert service.post("/nothing").status_code == 404


def test_large_bodies_are_cut_off_early(service):
    sent = 0

    def endless():
        nonlocal sent
        for _ in range(1000):
            sent += 100_000
            yield b"x" * 100_000

    with contextlib.suppress(httpx.HTTPError):  # the server may close before the answer is read
        assert service.post("/retrieve", content=endless()).status_code == 413
    assert sent < 60_000_000
    assert service.get("/health").status_code == 200


def test_ten_megabytes_are_refused_with_an_answer(service):
    for _ in range(3):
        assert service.post("/retrieve", content=b'{"queries": ["' + b"x" * 10_000_000 + b'"]}').status_code == 413


def _raw(service, data):
    connection = socket.create_connection((service.base_url.host, service.base_url.port), timeout=10)
    connection.sendall(data)
    return connection


def test_slow_and_dead_clients_hold_nothing(service):
    head = b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
    slow = _raw(service, head + b'{"queries"')  # never ends
    for _ in range(20):
        _raw(service, head + b'{"que').close()  # gone in the middle of the body
        full = b'{"queries": ["word1"]}'
        _raw(service, head.replace(b"500", str(len(full)).encode()) + full).close()  # gone before the answer
        _raw(service, b"\x16\x03\x01 not http\r\n\r\n").close()
    assert b" 408 " in slow.recv(1000)
    slow.close()
    assert service.post("/retrieve", json={"queries": ["word1"]}).status_code == 200
    assert service.get("/health").json() == {"status": "ok", "passages": 40, "pending_queries": 0}
    metrics = service.get("/metrics").text
    assert 'status="499"} 20' in metrics and 'status="502"' not in metrics


def test_a_failing_search_fails_alone():
    with running(Slow(0.05)) as service, ThreadPoolExecutor(12) as pool:

        def ask(query):
            return service.post("/retrieve", json={"queries": [query], "topk": 1})

        ask("word0")
        queries = ["poison", "unavailable", *(f"word{i}" for i in range(10))]
        answers = list(pool.map(ask, queries))
        assert [a.status_code for a in answers] == [502, 502] + [200] * 10
        assert [a.json()["result"][0][0]["id"] for a in answers[2:]] == [f"p{i}" for i in range(10)]
        assert answers[0].json() == {"detail": "search failed: ValueError"}  # nothing of the server's inside
        assert "timeout" in answers[1].json()["detail"]
        metrics = service.get("/metrics").text
        assert 'cipo_requests_total{path="/retrieve",status="502"} 2' in metrics
        assert "cipo_search_failures_total 2" in metrics


def test_clients_are_batched():
    retriever = Slow(0.05)
    with running(retriever) as service, ThreadPoolExecutor(32) as pool:

        def ask(i):
            k = 1 + i % 2  # two values of top-k are never mixed
            answer = service.post("/retrieve", json={"queries": [f"word{i % 40} land{i % 40 // 2}"], "topk": k}).json()
            return answer["result"][0][0]["id"] == f"p{i % 40}" and len(answer["result"][0]) == k

        begin = time.monotonic()
        assert all(pool.map(ask, range(256)))
        seconds = time.monotonic() - begin
    assert sum(retriever.sizes) == 256
    assert len(retriever.sizes) < 64 and max(retriever.sizes) > 8
    assert seconds < 256 * 0.05 / 4  # one at a time would take 12.8 s


def test_overload_is_refused_and_recovers():
    with (
        running(Slow(0.3), ServiceLimits(max_batch=4, max_pending_queries=8)) as service,
        ThreadPoolExecutor(20) as pool,
    ):
        codes = list(pool.map(lambda _: service.post("/retrieve", json={"queries": ["word1"]}), range(20)))
        statuses = sorted(c.status_code for c in codes)
        assert set(statuses) == {200, 503} and statuses.count(200) >= 8
        refused = next(c for c in codes if c.status_code == 503)
        assert refused.headers["retry-after"] == "1" and "overloaded" in refused.json()["detail"]
        assert service.post("/retrieve", json={"queries": ["word1"]}).status_code == 200


_PROGRAM = """
import time
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.retrieval.serve import serve_index
class Slow:
    corpus = ListCorpus([{"text": "red fox"}, {"text": "blue sea"}])
    inner = sparse_retriever(corpus)
    def retrieve(self, queries, top_k):
        time.sleep(1.0 if "slow" in queries else 0)
        return self.inner.retrieve(queries, top_k)
    def passage(self, row):
        return self.corpus.passage(row)
serve_index(Slow(), port=0)
"""


def test_sigterm_finishes_running_requests():
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("serving 2 passages on http://127.0.0.1:")
        url = line.split()[-1]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                lambda: httpx.post(
                    f"{url}/retrieve", json={"queries": ["slow"], "topk": 1}, timeout=20, trust_env=False
                )
            )
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            assert answer.result().status_code == 200
        assert process.wait(10) == 0
        assert process.stdout.read() == "stopped\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("host, port", [("256.1.1.1", 0), ("127.0.0.1", 99_999)])
def test_addresses_that_cannot_be_bound_are_user_errors(host, port):
    with pytest.raises(UserError, match="cannot listen"):
        serve_index(Slow(), host, port)
