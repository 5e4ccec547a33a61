"""`axlearn serve --replicas`: several servers behind Ray Serve."""

import asyncio
import json
import os
import socket
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_plugins_serving.server.engine_thread import EngineThread
from axlearn_plugins_serving.server.limits import ServerLimits
from axlearn_plugins_serving.server.replicas import ReplicaApp
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.fake_engine import FakeEngine
from support.needs import needs

SET = ["--set", "serving.runner.max_rows=2", "--set", "serving.runner.max_context=64"]
SET += ["--set", "serving.runner.row_buckets=[]", "--set", "serving.runner.chunk_buckets=[]"]


def serve(*words):
    return CliRunner().invoke(cli, ["serve", *map(str, words)])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # cannot be imported
    refused = serve(tmp_path, "--replicas", 2, "--port", free_port())
    assert refused.exit_code == 2
    assert "fix: pip install 'axlearn-plugins-serving[ray]'" in refused.stderr


def test_options_that_do_not_go_together(tmp_path):
    both = serve(tmp_path, "--replicas", 2, "--prefill", 1, "--port", free_port())
    assert both.exit_code == 2
    assert "--replicas cannot be combined with --prefill or --decode" in both.stderr
    anywhere = serve(tmp_path, "--replicas", 2, "--port", 0)
    assert anywhere.exit_code == 2
    assert "--replicas needs a fixed port" in anywhere.stderr
    ignored = serve(tmp_path, "--replicas", 2, "--port", free_port(), "--grace", 5, "--log-requests")
    assert ignored.exit_code == 2
    assert "--replicas does not support --grace, --log-requests" in ignored.stderr


def test_a_replica_leaves_the_id_to_ray_and_explains_missing_responses():
    text = TextProcessor.Config(template=ChatTemplate.Config()).build(tokenizer=ByteTokenizer.Config().build())
    service = Service(EngineThread(FakeEngine()), text, "tiny")

    async def run():
        app, events, answers = ReplicaApp(lambda: service, ServerLimits()), asyncio.Queue(), asyncio.Queue()
        events.put_nowait({"type": "lifespan.startup"})
        life = asyncio.create_task(app({"type": "lifespan"}, events.get, answers.put))
        assert await answers.get() == {"type": "lifespan.startup.complete"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            missing = await client.get("/v1/responses/resp_1")
        events.put_nowait({"type": "lifespan.shutdown"})
        await life
        return missing

    missing = asyncio.run(run())
    assert "x-request-id" not in missing.headers
    assert missing.status_code == 404
    assert "replicas do not share their stored responses" in missing.json()["error"]["message"]


@pytest.mark.slow
@needs("ray", "fastapi")  # installed by ray[serve]
def test_two_replicas_answer(tmp_path):
    import openai  # takes half a second, so not while tests are collected

    run, port = tmp_path / "run", free_port()
    settings = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "evaluators": {}}
    settings |= {"input.sequence_length": 32, "input.batch_size": 8}
    ax.train("quickstart", run_dir=run, steps=1, set=settings)
    command = [sys.executable, "-m", "axlearn_core", "serve", str(run), "--port", str(port), "--replicas", "2", *SET]
    command += ["--chat-template", "plain"]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    with open(tmp_path / "stderr", "w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            line = process.stdout.readline()
            assert line.startswith("run at http://127.0.0.1:"), (line, (tmp_path / "stderr").read_text()[-3000:])
            url = line.split()[-1]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                options = {"model": "run", "prompt": "def ", "max_tokens": 8, "temperature": 0}
                texts = {client.completions.create(**options).choices[0].text for _ in range(8)}
                assert len(texts) == 1
                pieces = [e.choices[0].text for e in client.completions.create(**options, stream=True)]
                assert "".join(pieces) == texts.pop()
                schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
                chat = {"model": "run", "messages": [{"role": "user", "content": "Yes?"}], "response_format": schema}
                for _ in range(4):  # more than the number of replicas
                    answer = client.chat.completions.create(**chat, temperature=0)
                    assert json.loads(answer.choices[0].message.content) in ("yes", "no")
            wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": -1})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "max_tokens"
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait(20)
            process.stdout.close()
