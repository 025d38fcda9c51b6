"""build_index and serve_index as a user runs them, with a tiny encoder."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")


def _command(module, *bindings, repository):
    arguments = [f"--gin_binding={b}" for b in bindings]
    return {
        "args": [sys.executable, "-m", f"cipo_jax.{module}", "--gin_file=tasks/retrieval_minilm.gin", *arguments],
        "env": {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(repository)},
        "text": True,
    }


def test_build_then_serve(tiny_encoder, tmp_path, repository):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    records = [{"id": f"p{i}", "title": f"w{i}", "text": f"w{i} w{(i + 1) % 40} w{(i * 7) % 40}"} for i in range(40)]
    corpus.write_text("".join(json.dumps(r) + "\n" for r in records))
    settings = (
        f'CORPUS = "{corpus}"',
        f'ENCODER = "{tiny_encoder}"',
        f'INDEX = "{index}"',
        "EncoderSpec.max_tokens = 24",
    )
    missing = subprocess.run(**_command("serve_index", *settings, repository=repository), capture_output=True)
    assert missing.returncode == 2 and "make one with build_index" in missing.stderr
    built = subprocess.run(**_command("build_index", *settings, repository=repository), capture_output=True)
    assert built.returncode == 0, built.stderr
    assert "GiB are available" in built.stdout and "40 of 40 passages" in built.stdout
    server = subprocess.Popen(
        **_command("serve_index", *settings, "serve_index.port = 0", repository=repository), stdout=subprocess.PIPE
    )
    try:
        line = server.stdout.readline()
        assert line.startswith("serving 40 passages on http://127.0.0.1:"), line
        url = line.split()[-1]
        asked = {"queries": [f'"w5"\n{records[5]["text"]}'], "topk": 2, "return_scores": True}
        answer = httpx.post(f"{url}/retrieve", json=asked, timeout=30, trust_env=False).json()
        assert answer["result"][0][0]["document"]["id"] == "p5"
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0
    finally:
        server.kill()
        server.wait()
