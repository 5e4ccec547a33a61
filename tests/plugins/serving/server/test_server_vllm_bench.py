"""`vllm bench serve`, an independent load generator, against our server."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from axlearn_plugins_serving.server import external
from support.paths import HF_FIXTURES

FIXTURE = HF_FIXTURES / "llama3"
SIZES = ("max_rows=4", "max_context=128", "max_step_tokens=64", "row_buckets=[]", "chunk_buckets=[]")
REQUESTS, OUTPUT = 24, 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(external.COMMAND not in os.environ, reason=f"needs vLLM: set {external.COMMAND} to its command"),
]


@pytest.fixture(scope="module")
def url():
    """Run our server in another process and yield its address."""
    settings = [word for size in SIZES for word in ("--set", f"serving.runner.{size}")]
    command = [sys.executable, "-m", "axlearn_core", "serve", str(FIXTURE), "--port", "0", "--chat-template", "plain"]
    command += ["--served-model-name", "tiny", *settings]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line.startswith("tiny at http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        process.stdout.close()
        assert code == 0


def bench(url, tmp_path, *options):
    """Return the results of `vllm bench serve`."""
    command = [
        os.environ[external.COMMAND], "bench", "serve", "--base-url", url, "--model", "tiny", "--tokenizer", str(FIXTURE),
        "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", str(OUTPUT),
        "--num-prompts", str(REQUESTS), "--max-concurrency", "6", "--ignore-eos", "--seed", "1",
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json", *options,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((tmp_path / "result.json").read_text())


def counter(url, name):
    """Return a counter of `/metrics`."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "openai", "--endpoint", "/v1/completions"),
        ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
    ],
    ids=["completions", "chat"],
)
def test_every_request_is_answered_in_full(url, tmp_path, options):
    name = "axlearn_output_tokens_total"
    before = counter(url, name)
    measured = bench(url, tmp_path, *options)
    assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
    assert measured["output_lens"] == [OUTPUT] * REQUESTS
    assert not any(measured["errors"])
    assert counter(url, name) - before == REQUESTS * OUTPUT
    assert counter(url, "axlearn_used_blocks") == 0
    assert 0 < measured["median_ttft_ms"] < measured["median_e2el_ms"]
    assert measured["output_throughput"] == pytest.approx(REQUESTS * OUTPUT / measured["duration"], rel=1e-3)
