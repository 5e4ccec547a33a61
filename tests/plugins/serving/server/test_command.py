"""`axlearn serve`: invalid options, and the life of a server in another process."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.train.inference import load
from axlearn_plugins_serving.open_engine import OpenedEngine
from axlearn_plugins_serving.server.server_log import write_logs
from axlearn_plugins_serving.server.server_runner import bind
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.fake_engine import FakeEngine
from support.server_thread import serving


def serve(*arguments):
    return CliRunner().invoke(cli, ["serve", *arguments])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Train a model of one layer."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    settings = {
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "input.sequence_length": 32,
        "input.batch_size": 8,
        "evaluators": {},
    }
    ax.train("quickstart", run_dir=directory, steps=3, set=settings)
    return directory


def test_a_port_in_use(tmp_path):
    with bind("127.0.0.1", 0) as busy:
        refused = serve(str(tmp_path), "--port", str(busy.getsockname()[1]))
    assert refused.exit_code == 2
    assert "the port is in use" in refused.stderr


def test_no_model(tmp_path):
    refused = serve(str(tmp_path / "none"), "--port", "0")
    assert refused.exit_code == 2
    assert "does not exist" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "model.decoder.num_layers=2"], "expected: serving.PATH=VALUE"),
        (["--set", "serving.max_wating=2"], "max_waiting"),
        (["--set", "serving.max_waiting=many"], "serving.max_waiting"),
        (["--set", "serving.max_waiting"], "expected PATH=VALUE"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--port", "70000"], "70000"),
        (["--grace", "-1"], "-1"),
        (["--host", "203.0.113.7"], "cannot listen on"),
    ],
)
def test_options_that_are_wrong(arguments, says, tmp_path):
    refused = (
        serve(str(tmp_path), *arguments) if "--port" in arguments else serve(str(tmp_path), "--port", "0", *arguments)
    )
    assert refused.exit_code == 2
    assert says in refused.stderr


@pytest.mark.slow
def test_a_model_that_is_not_a_decoder(tmp_path):
    settings = {"model.encoder.num_layers": 1, "input.batch_size": 8, "evaluators": {}}
    ax.train("vit-tiny", run_dir=tmp_path / "vit", steps=1, set=settings)
    refused = serve(str(tmp_path / "vit"), "--port", "0")
    assert refused.exit_code == 2
    assert "cannot be served" in refused.stderr


def open_fake_engine(text):
    """Return a fake `open_engine` of a model with this text processor. It may not be compiled if the text is rejected."""

    def open_engine(uri, *, prepare_text, **options):
        prepared = prepare_text(text)
        engine = FakeEngine()
        engine.adapters = ()
        return OpenedEngine(engine, prepared, "tiny")

    return open_engine


@pytest.fixture
def text():
    return TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())


def test_a_run_without_a_tokenizer(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.open_engine.open_engine", open_fake_engine(None))
    refused = serve("runs/numbers", "--port", "0")
    assert refused.exit_code == 2
    assert "runs/numbers has no tokenizer" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--tool-parser", "hermess", "did you mean: hermes?"),
        ("--reasoning-parser", "thinks", "did you mean: think?"),
        ("--chat-template", "missing.jinja", "missing.jinja: No such file"),
        ("--chat-template", "broken.jinja", "broken.jinja: line 2: Encountered unknown tag 'en'"),
        ("--response-store", "missing/responses.db", "missing/responses.db"),
    ],
)
def test_options_about_text_are_checked_before_compiling(option, value, says, run_dir, tmp_path, monkeypatch):
    (tmp_path / "broken.jinja").write_text("{% if messages %}\n{% en %}")
    monkeypatch.chdir(tmp_path)

    def compile_nothing(*args, **options):
        raise AssertionError("the option was not checked first")

    monkeypatch.setattr("axlearn_plugins_serving.open_engine.build_engine", compile_nothing)
    refused = serve(str(run_dir), "--port", "0", option, value)
    assert refused.exit_code == 2, refused.output
    assert says in refused.stderr


@pytest.mark.parametrize("log_requests", [True, False])
def test_a_line_for_each_request(log_requests, monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with write_logs(requests=log_requests), serving(FakeEngine(max_context=64)) as server:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        assert httpx.get(server.url + "/nowhere").status_code == 404
    lines = errors.getvalue().splitlines()
    if not log_requests:
        assert lines == []
        return
    first, second = lines
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\d [\d:,]+ 127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1\.1" 200 id=req-\w+', first
    )
    assert '"GET /nowhere HTTP/1.1" 404 id=req-' in second


def test_options_reach_the_server(text, monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.engine_devices.set_up_devices", lambda *args, **options: None)
    monkeypatch.setattr("axlearn_plugins_serving.open_engine.open_engine", open_fake_engine(text))
    runners = []

    class Recorder:
        def __init__(self, service, limits, **options):
            runners.append((service, limits, options))

        async def run(self, listener, ready):
            listener.close()
            return 0

    monkeypatch.setattr("axlearn_plugins_serving.server.server_runner.ServerRunner", Recorder)
    options = ["--max-body", "2048", "--grace", "7", "--log-requests", "--served-model-name", "mine"]
    result = serve("runs/any", "--port", "0", *options, "--chat-template", "plain")
    assert result.exit_code == 0, result.output
    ((service, limits, options),) = runners
    assert limits.body_bytes == 2048
    assert options == {"grace": 7.0, "tracer": None}
    assert service.name == "mine"


@pytest.mark.slow
def test_the_life_of_a_server(run_dir, tmp_path):
    import openai  # takes half a second, so not while tests are collected

    loaded = load(run_dir)
    prompts = ["def ", "import ", "class A:\n"]
    expected = [loaded.generate(prompt, max_tokens=12) for prompt in prompts]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"], "SERVE_KEY": "k3y"}
    options = ["--port", "0", "--served-model-name", "small", "--chat-template", "plain", "--api-key-env", "SERVE_KEY"]
    sizes = ["--set", "serving.runner.max_rows=4", "--set", "serving.runner.max_context=128", "--max-queue", "64"]
    command = [sys.executable, "-m", "axlearn_core", "serve", str(run_dir), *options, *sizes]
    with open(tmp_path / "stderr", "w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            assert process.stdout
            line = process.stdout.readline()
            assert line.startswith("small at http://127.0.0.1:"), (line, Path(errors.name).read_text())
            url = line.split()[-1]
            with openai.OpenAI(base_url=url + "/v1", api_key="k3y", max_retries=0) as client:
                for prompt, text in zip(prompts, expected, strict=True):
                    response = client.completions.create(model="small", prompt=prompt, max_tokens=12, temperature=0)
                    assert response.choices[0].text == text
                format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
                messages = [{"role": "user", "content": "Yes?"}]
                chat = client.chat.completions.create(model="small", messages=messages, response_format=format)
                assert json.loads(chat.choices[0].message.content) in ("yes", "no")
                stats = httpx.get(url + "/stats", headers={"authorization": "Bearer k3y"}).json()
                assert stats["compilations"] == 0
                assert stats["used_blocks"] == 0
                stream = client.completions.create(model="small", prompt="a", max_tokens=40, stream=True, temperature=0)
                next(iter(stream))
                process.send_signal(signal.SIGTERM)
                assert sum(1 for _ in stream) > 0  # it finishes normally
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait(20)
            process.stdout.close()
