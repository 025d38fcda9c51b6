"""The retrieval service under load: parallel clients, hostile requests, memory over minutes.

    python -m cipo_jax.benchmarks.retrieval_serving --minutes=5 --json=out.json

Starts the service over a synthetic corpus in its own process, with `--latency_ms` injected into every call of the
retriever (as a large index would take), and measures requests per second for each number of clients; then keeps it
under mixed load (good, malformed, oversized and abandoned requests) while it watches resident memory.
"""

import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import time

import httpx
from absl import app, flags

from cipo_jax.benchmarks.report import write_report

FLAGS = flags.FLAGS
flags.DEFINE_integer("passages", 20_000, "Size of the synthetic corpus.")
flags.DEFINE_float("latency_ms", 50.0, "Added to every call of the retriever.")
flags.DEFINE_multi_integer("clients", [1, 8, 64], "Concurrent clients.")
flags.DEFINE_float("seconds", 5.0, "Per number of clients.")
flags.DEFINE_float("minutes", 5.0, "Of mixed load.")
flags.DEFINE_string("json", None, "File for the numbers.")

_SERVER = """
import random, sys, time
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.retrieval.serve import serve_index
rng = random.Random(0)
words = [f"w{i}" for i in range(5000)]
class Slow:
    corpus = ListCorpus({"title": f"T{i}", "text": " ".join(rng.choices(words, k=40))} for i in range(int(sys.argv[1])))
    inner = sparse_retriever(corpus, dim=64)
    def retrieve(self, queries, top_k):
        time.sleep(float(sys.argv[2]) / 1000)
        return self.inner.retrieve(queries, top_k)
    def passage(self, row):
        return self.corpus.passage(row)
serve_index(Slow(), port=0)
"""
_HOSTILE = (
    b"{",
    b"[" * 50_000,
    b'{"queries": ["a"], "topk": 1000000}',
    b'{"queries": [' + b'"x",' * 500 + b'"x"]}',
    b'{"queries": ["' + b"x" * 10_000_000 + b'"]}',
)


def _resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


async def _throughput(port: int, clients: int, seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    end = time.monotonic() + seconds

    async def client(seed: int) -> None:
        # Plain sockets: an HTTP library here would take more of the machine than the service does.
        rng = random.Random(seed)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            begin = time.monotonic()
            query = f"w{rng.randrange(5000)} w{rng.randrange(5000)}"
            body = json.dumps({"queries": [query], "topk": 3, "return_scores": True})
            writer.write(f"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
            assert len(answer["result"][0]) == 3
            latencies.append(time.monotonic() - begin)
        writer.close()

    await asyncio.gather(*(client(i) for i in range(clients)))
    return {"requests_per_second": len(latencies) / seconds, "median_ms": 1000 * statistics.median(latencies)}


async def _mixed_load(url: str, port: int, pid: int, minutes: float) -> dict:
    end, answered, resident = time.monotonic() + 60 * minutes, {}, []

    async def good(session: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            body = {"queries": [f"w{random.randrange(5000)}"] * random.randrange(1, 8), "topk": random.randrange(1, 6)}
            status = (await session.post(f"{url}/retrieve", json=body)).status_code
            answered[status] = answered.get(status, 0) + 1

    async def hostile(session: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            try:
                status = (await session.post(f"{url}/retrieve", content=random.choice(_HOSTILE))).status_code
            except httpx.TransportError:  # the server may close before a refused body is sent
                status = "closed"
            answered[status] = answered.get(status, 0) + 1
            await asyncio.sleep(0.05)

    async def abandon() -> None:
        body = json.dumps({"queries": ["w1"], "topk": 3}).encode()
        while time.monotonic() < end:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write((head + body)[: random.randrange(1, len(head + body) + 1)])
            writer.close()
            answered["abandoned"] = answered.get("abandoned", 0) + 1
            await asyncio.sleep(0.02)

    async def watch() -> None:
        while time.monotonic() < end:
            resident.append(_resident_mib(pid))
            await asyncio.sleep(1)

    async with httpx.AsyncClient(timeout=30, trust_env=False) as session:
        await asyncio.gather(*(good(session) for _ in range(32)), hostile(session), abandon(), watch())
    health = httpx.get(f"{url}/health", trust_env=False).json()
    quarter = max(1, len(resident) // 4)
    return {
        "minutes": minutes,
        "answers": {str(k): v for k, v in sorted(answered.items(), key=lambda item: str(item[0]))},
        "resident_mib_by_quarter": [statistics.median(resident[i * quarter : (i + 1) * quarter]) for i in range(4)],
        "resident_mib_peak": max(resident),
        "health_after": health,
    }


def main(_) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every request at INFO
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(FLAGS.passages), str(FLAGS.latency_ms)], stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().split()[-1]
        port = int(url.rsplit(":", 1)[1])
        report: dict = {"latency_ms": FLAGS.latency_ms, "clients": {}}
        for clients in FLAGS.clients:
            report["clients"][clients] = asyncio.run(_throughput(port, clients, FLAGS.seconds))
        rates = [report["clients"][c]["requests_per_second"] for c in FLAGS.clients]
        report["last_over_first"] = rates[-1] / rates[0]
        report["idle_resident_mib"] = _resident_mib(server.pid)
        if FLAGS.minutes > 0:
            report["mixed_load"] = asyncio.run(_mixed_load(url, port, server.pid, FLAGS.minutes))
        begin = time.monotonic()
        server.terminate()
        report["exit_code"], report["shutdown_s"] = server.wait(30), time.monotonic() - begin
    finally:
        server.kill()
        server.wait()
    write_report(report, FLAGS.json)


if __name__ == "__main__":
    app.run(main)
