"""`axlearn serve --engine vllm`: arguments, signals and exit codes, and tokens if vLLM is installed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.server import external
from support.paths import HF_FIXTURES

FIXTURE = HF_FIXTURES / "llama3"
PROGRAM = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
record = {{"arguments": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY"), "files": sorted(os.listdir(sys.argv[2]))}}
def stop(number, frame):
    print("stopped by", number, flush=True)
    sys.exit({code_of_signal})
signal.signal(signal.SIGTERM, stop)
Path({record!r}).write_text(json.dumps(record))
{then}
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Replace vLLM by a program that records its arguments."""

    def install(then="", code_of_signal=0):
        program, record = tmp_path / "vllm", tmp_path / "record.json"
        text = PROGRAM.format(python=sys.executable, record=str(record), then=then, code_of_signal=code_of_signal)
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv(external.COMMAND, str(program))
        return record

    return install


def serve(*arguments):
    command = [sys.executable, "-m", "axlearn_core", "serve", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_vllm_gets_the_directory_and_the_options(fake, monkeypatch):
    record = fake()
    monkeypatch.setenv("KEY", "secret")
    process = serve(FIXTURE, "--engine", "vllm", "--port", 8011, "--api-key-env", "KEY", "--", "--max-model-len", 64)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    facts = json.loads(record.read_text())
    assert facts["arguments"] == [
        "serve", str(FIXTURE), "--host", "127.0.0.1", "--port", "8011", "--served-model-name", "llama3", "--max-model-len", "64",
    ]  # fmt: skip
    assert facts["key"] == "secret"
    assert "secret" not in json.dumps(facts["arguments"])


@pytest.mark.slow
def test_a_run_is_exported_and_the_export_is_removed(fake, tmp_path):
    from axlearn_plugins_models.huggingface.import_export import import_run

    record = fake()
    import_run(FIXTURE, tmp_path / "run")
    process = serve(tmp_path / "run", "--engine", "vllm", "--served-model-name", "mine")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    facts = json.loads(record.read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(facts["files"])
    assert not Path(facts["arguments"][1]).exists()
    assert "mine" in facts["arguments"]


@pytest.mark.slow
@pytest.mark.parametrize(("code_of_signal", "expected"), [(0, 0), (3, 3)])
def test_a_signal_reaches_vllm_and_its_code_is_ours(fake, code_of_signal, expected):
    record = fake("time.sleep(60)", code_of_signal)
    process = serve(FIXTURE, "--engine", "vllm")
    for _ in range(600):
        if record.exists():
            break
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == expected, errors
    assert f"stopped by {int(signal.SIGTERM)}" in out


@pytest.mark.slow
def test_vllm_that_fails_ends_the_command_with_its_code(fake):
    fake("sys.exit(7)")
    process = serve(FIXTURE, "--engine", "vllm")
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delenv(external.COMMAND, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RequestError, match=r"the command `vllm` is not on the PATH\n    fix: .*AXLEARN_VLLM="):
        external.find_vllm()
    monkeypatch.setenv(external.COMMAND, "/nowhere/vllm")
    with pytest.raises(RequestError, match="AXLEARN_VLLM is set to '/nowhere/vllm', which is not a command"):
        external.find_vllm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "vllm", "--max-queue", "3"), "--engine vllm does not support --max-queue"),
        (("--engine", "vllm", "--set", "serving.max_waiting=3"), "--engine vllm does not support --set"),
        (("--", "--max-model-len", "64"), "unexpected arguments: --max-model-len 64"),
    ],
)
def test_options_of_the_other_engine_are_refused(fake, arguments, says):
    record = fake()
    process = serve(FIXTURE, *arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert says in errors
    assert not record.exists()


@pytest.mark.slow
def test_a_directory_without_a_model_is_refused(fake, tmp_path):
    fake()
    process = serve(tmp_path, "--engine", "vllm")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(external.COMMAND not in os.environ, reason=f"needs vLLM: set {external.COMMAND} to its command")
def test_vllm_gives_the_greedy_tokens_of_the_generator(tmp_path, monkeypatch):
    """Use a model with head size 32, which vLLM's CPU build supports."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; the default may not be free

    import numpy as np

    import axlearn_core as ax
    from axlearn_core.train import load
    from axlearn_plugins_transformer.generate import Generator

    settings = {
        "model.decoder.num_layers": 2, "model.decoder.hidden_dim": 64, "model.decoder.layer.attention.num_heads": 2,
        "model.decoder.layer.feed_forward.hidden_dim": 128, "evaluators": {}, "model.dtype": "float32",
    }  # fmt: skip
    ax.train("quickstart", set=settings, steps=2, run_dir=tmp_path / "run")
    loaded = load(tmp_path / "run")
    prompt = np.random.default_rng(0).integers(3, 200, 12).tolist()
    ours = list(Generator(loaded.model, loaded.program)(prompt, max_tokens=16))
    process = serve(
        tmp_path / "run", "--engine", "vllm", "--port", 8017, "--served-model-name", "m", "--",
        "--dtype", "float32", "--max-model-len", 128,
    )  # fmt: skip
    url, body = "http://127.0.0.1:8017", {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    try:
        for _ in range(600):
            assert process.poll() is None, process.communicate()[1][-3000:]
            try:
                if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        body |= {"ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        theirs = [int(t.removeprefix("token_id:")) for t in answer["choices"][0]["logprobs"]["tokens"]]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert theirs == ours
