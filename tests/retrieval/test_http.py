"""The HTTP client against servers that misbehave: every failure is typed, counted and bounded in time."""

import threading
import time

import pytest
from bad_server import Server

from cipo_jax.errors import UserError
from cipo_jax.retrieval.http import HttpRetriever, row_of
from cipo_jax.retrieval.retriever import Passage, RetrievalError


@pytest.fixture
def serve():
    servers = []

    def start(*behaviours):
        servers.append(Server(*behaviours))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def _client(*servers, **options):
    settings = {"timeout_s": 0.4, "retries": 0, "backoff_s": 0.001, "max_backoff_s": 0.01, **options}
    return HttpRetriever([s if isinstance(s, str) else s.url for s in servers], **settings)


@pytest.mark.parametrize("form", ["good", "plain"])
def test_reads_both_forms_of_the_wire_format(serve, form):
    server = serve(form)
    client = _client(server)
    found = client.retrieve(["a", "b\udce9\x00"], 2)
    score = 1.0 if form == "good" else 0.0
    assert found[0][0] == Passage(0, "0", "T0", "a", score)
    assert [[p.text for p in f] for f in found] == [["a", "a"], ["b?\x00", "b?\x00"]]
    assert server.requests == [("/retrieve", {"queries": ["a", "b?\x00"], "topk": 2, "return_scores": True})]
    assert client.passage(1).title == "T1"
    with pytest.raises(IndexError):
        client.passage(7)
    assert client.retrieve([], 3) == [] and client.retrieve(["a"], 0) == [[]]
    assert client.counts == {"requests": 1}


@pytest.mark.parametrize(
    "behaviour, kind",
    [
        ("error500", "status"), ("refused422", "status"), ("redirect", "status"), ("html", "malformed"),
        ("cut", "malformed"), ("short", "malformed"), ("binary", "malformed"), ("deep", "malformed"),
        ("wrong_types", "malformed"), ("huge", "malformed"), ("hang_up", "malformed"), ("drop", "malformed"),
        ("not_http", "malformed"), ("silent", "timeout"), ("trickle", "timeout"),
    ],
)  # fmt: skip
def test_every_failure_is_typed_counted_and_bounded(serve, behaviour, kind):
    client = _client(serve(behaviour), max_response_bytes=200_000)
    begin = time.monotonic()
    with pytest.raises(RetrievalError) as error:
        client.retrieve(["a"], 1)
    assert time.monotonic() - begin < 3
    assert error.value.kind == kind
    assert client.counts == {"requests": 1, kind: 1}


def test_dead_server_is_a_connection_error(serve):
    server = serve("good")
    server.close()
    with pytest.raises(RetrievalError) as error:
        _client(server).retrieve(["a"], 1)
    assert error.value.kind == "connection"


@pytest.mark.parametrize("failure", ["error500", "html", "hang_up", "drop", "busy503"])
def test_retries_until_an_answer(serve, failure):
    server = serve(failure, failure, "good")
    client = _client(server, retries=2)
    assert len(client.retrieve(["a"], 3)[0]) == 3
    assert client.counts["requests"] == 3 and client.counts["retries"] == 2
    assert len(server.requests) == 3


def test_refusals_are_not_retried(serve):
    server = serve("refused422")
    with pytest.raises(RetrievalError, match="status 422"):
        _client(server, retries=5).retrieve(["a"], 1)
    assert len(server.requests) == 1


def test_retries_go_to_the_other_endpoint(serve):
    bad, good = serve("error500"), serve("good")
    client = _client(bad, good, retries=1)
    for _ in range(6):
        assert client.retrieve(["a"], 1)[0][0].title == "T0"
    assert len(good.requests) == 6


def test_circuit_opens_and_closes(serve):
    server = serve("error500", "error500", "error500", "good")
    client = _client(server, breaker_failures=2, breaker_reset_s=0.3)
    for _ in range(2):
        with pytest.raises(RetrievalError, match="status 500"):
            client.retrieve(["a"], 1)
    for _ in range(3):  # open: refused at once, the server is left alone
        with pytest.raises(RetrievalError) as error:
            client.retrieve(["a"], 1)
        assert error.value.kind == "circuit_open"
    assert len(server.requests) == 2 and client.counts["circuit_open"] == 3
    time.sleep(0.35)
    with pytest.raises(RetrievalError, match="status 500"):  # half open: one attempt, which fails
        client.retrieve(["a"], 1)
    with pytest.raises(RetrievalError, match="next try in"):
        client.retrieve(["a"], 1)
    time.sleep(0.35)
    for _ in range(3):
        assert client.retrieve(["a"], 1)[0]
    assert len(server.requests) == 6


def test_open_circuit_spares_the_bad_endpoint(serve):
    bad, good = serve("error500"), serve("good")
    client = _client(bad, good, retries=1, breaker_failures=2, breaker_reset_s=60)
    for _ in range(10):
        client.retrieve(["a"], 1)
    assert len(bad.requests) == 2 and len(good.requests) == 10


def test_many_threads_share_a_client(serve):
    client = _client(serve("good"), timeout_s=10, remembered=3)
    wrong = []

    def work(name):
        for i in range(10):
            if client.retrieve([f"{name}-{i}"], 2)[0][1].text != f"{name}-{i}":
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and client.counts == {"requests": 80}


def test_row_of():
    assert row_of("17") == 17 and row_of("2147483647") == 2**31 - 1
    for identifier in ("2147483648", "doc-1", "", "-3", "٣", "9" * 5000, "\udce9"):
        assert 0 <= row_of(identifier) < 2**31
    assert row_of("doc-1") == row_of("doc-1") != row_of("doc-2")


@pytest.mark.parametrize("endpoints", [[], "localhost:8000", ["http://a", "ftp://b"]])
def test_bad_endpoints_are_user_errors(endpoints):
    with pytest.raises(UserError, match="must be URLs"):
        HttpRetriever(endpoints)


def test_a_service_that_must_answer(serve):
    client = _client(serve("error500", "good"), retries=1, must_answer=True)
    assert not client.counts  # they are of the run's own searches
    dead = serve("good")
    dead.close()
    with pytest.raises(UserError, match=f"does not answer .*{dead.url}.*serve_index"):
        _client(dead, must_answer=True)
