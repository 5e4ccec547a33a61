"""Environments of the package verifiers: our side against a server without the package, and the whole path with the package.

The slow test needs an interpreter that has verifiers: `VERIFIERS_PYTHON=venv/bin/python pytest -m slow ...`.
"""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from axlearn_core.errors import InputError
from axlearn_plugins_rl.agents import verifiers_server
from axlearn_plugins_rl.agents.attempt import Attempt
from axlearn_plugins_rl.agents.policy_service import PolicyService
from axlearn_plugins_rl.agents.policy_url import open_url
from axlearn_plugins_rl.agents.verifiers_source import VerifiersSource, VerifiersTask, request_json
from axlearn_plugins_rl.environments.guarded_calls import call_in_thread
from axlearn_plugins_rl.environments.rollout_formats import RolloutFormats
from axlearn_plugins_rl.rollout_contracts import Example
from axlearn_plugins_rl.testing.scripted_policy import ScriptedPolicy
from axlearn_plugins_serving.server.app import create_app
from support import cli_runs

EXAMPLES = [{"id": "a", "prompt": "1+1="}, {"id": "a", "prompt": [{"role": "user", "content": "2+2="}]}]


class Server(ThreadingHTTPServer):
    """A server that speaks the protocol of `verifiers_server`. `answer` gets the fields of an episode and returns its result."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.examples = answer, EXAMPLES
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send({"examples": self.server.examples})

    def do_POST(self):
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send(self.server.answer(fields))

    def send(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer=None):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(fields):
    """Call the policy as an episode does, and reward the answer 11."""
    messages = [{"role": "user", "content": f"example {fields['example']}"}]
    answer = request_json(f"{fields['url']}/chat/completions", {"model": fields["model"], "messages": messages}, 10)
    text = answer["choices"][0]["message"]["content"]
    return {"reward": float(text == "11"), "metrics": {"size": len(text)}, "error": None}


def collect(server, seeds=(1, 2), policy=None, **options):
    source = VerifiersSource.Config(url=server.url, **options).build()
    policy = policy or ScriptedPolicy(lambda context, seed: "11" if "example 7" in context else "12")
    return asyncio.run(source.collect(Example(id="7-x", prompt="unused", answer=7), policy, list(seeds)))


def test_an_episode_calls_the_policy_and_its_tokens_are_recorded(serve):
    rollouts = collect(serve(ask))
    for rollout in rollouts:
        assert (rollout.error, rollout.finish, rollout.text) == (None, "stop", "11")
        expected = {"environment_reward": 1.0, "verifiers_size": 2.0, "turns": 1.0}
        assert expected.items() <= rollout.metrics.items()
        ((prompt, drawn),) = rollout.trajectories
        assert (prompt.drawn, drawn.drawn) == (False, True)
        assert bytes(int(t) for t in drawn.tokens[:-1]).decode() == "11"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": None, "metrics": {}, "error": "SandboxError: gone"}, "SandboxError: gone"),
        ({"reward": "much"}, "the server answered"),
        ({"reward": 1.0, "metrics": {"x": float("nan")}}, "the server answered"),
    ],
)
def test_a_failed_episode_is_a_rollout_with_an_error(serve, answer, message):
    (rollout,) = collect(serve(lambda fields: answer), seeds=[1])
    assert rollout.finish == "error"
    assert message in rollout.error


def test_a_slow_episode_ends(serve):
    (rollout,) = collect(serve(lambda fields: time.sleep(0.3) or {}), seeds=[1], time_limit=0.1)
    assert rollout.finish == "error"


def test_the_task_lists_the_examples_of_the_server(serve):
    task = VerifiersTask.Config(url=serve().url, validation_fraction=0.0).build()
    first, second = task.examples("train")
    assert (first.id, first.prompt, first.answer) == ("0-a", "1+1=", 0)
    assert (second.id, second.prompt[0]["content"], second.answer) == ("1-a", "2+2=", 1)
    assert task.describe()["examples"] == 2
    assert not len(task.examples("held_out"))


def test_a_server_that_is_not_there_or_empty_is_an_error(serve):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match=r"cannot be read from(?s:.*)python verifiers_server.py TASKSET"):
        VerifiersTask.Config(url=url).build().examples("train")
    server = serve()
    server.examples = []
    with pytest.raises(InputError, match="lists no examples"):
        VerifiersTask.Config(url=server.url).build().examples("train")


def test_only_the_secret_path_reaches_the_policy():
    policy = ScriptedPolicy(lambda context, seed: "11")

    async def try_paths():
        app = create_app(PolicyService.open(policy, RolloutFormats.Config().build()))
        attempt = Attempt(example=Example(id="x", prompt="x"), policy=policy, seed=1)
        async with open_url(app, attempt) as url:
            models = await call_in_thread(request_json, f"{url}/models", None, 5)
            host = url.rsplit("/", 2)[0]
            with pytest.raises(OSError, match="status 404"):
                await call_in_thread(request_json, f"{host}/v1/models", None, 5)
        return url, models

    url, models = asyncio.run(try_paths())
    assert models["data"][0]["id"] == "policy"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=1)


TASKSET = """
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def has_letter(self, trace: vf.Trace) -> float:
        return float(any(c.isalnum() for c in str(trace.last_reply)))

    @vf.metric
    async def size(self, trace: vf.Trace) -> float:
        return float(len(str(trace.last_reply)))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for a in range(6):
            yield SumTask(SumData(prompt=f"{a}+1=", answer=str(a + 1)), self.config.task)
"""


@pytest.fixture
def episodes(tmp_path):
    """Start `verifiers_server` with the package, and return its URL."""
    python = os.environ.get("VERIFIERS_PYTHON")
    if python is None:
        pytest.skip("needs VERIFIERS_PYTHON, an interpreter that has the package verifiers")
    (tmp_path / "sums_v1.py").write_text(TASKSET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = json.dumps({"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}})
    words = [python, verifiers_server.__file__, "sums_v1", "--port", str(port), "--config", config]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (Path(tmp_path) / "log").open("w") as log:
        process = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        for _ in range(120):
            try:
                request_json(f"http://127.0.0.1:{port}/examples", None, 5)
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_a_model_trains_on_episodes_of_verifiers(episodes, tmp_path):
    options = f"task={{type: verifiers-task, url: '{episodes}'}},batch_size=2,group_size=2,max_tokens=4,kl=0"
    settings = (
        "model.vocab_size=264",
        "input.tokenizer={type: byte-tokenizer}",
        "input.sequence_length=64",
        f"loop.source={{type: verifiers, url: '{episodes}', time_limit: 120}}",
        "loop.reward={type: environment}",
    )
    arguments = cli_runs.arguments(tmp_path / "run", steps=2, settings=settings, more=("--with", f"grpo:{options}"))
    cli_runs.axlearn(*arguments)
    rows = [row for row in cli_runs.metrics(tmp_path / "run") if "loss" in row]
    assert [row["rollout_errors"] for row in rows] == [0, 0]
    assert all(row["turns"] == 1 and row["verifiers_size"] >= 0 and 0 <= row["reward"] <= 1 for row in rows)
    assert all(row["train_rollout_difference"] < 1e-4 for row in rows)
