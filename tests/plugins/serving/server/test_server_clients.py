"""Libraries and commands that use the OpenAI or the Anthropic API, unchanged, against our server.

Each client has a script in `clients`, which runs in an environment of its own and prints its results.
"""

import json
from pathlib import Path

import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import open_engine
from axlearn_plugins_serving.server.limits import ServerLimits
from support.client_environments import node_environment, python_environment, run_script
from support.fake_engine import FakeEngine
from support.scripted_models import WeatherScript, hermes_template
from support.server_thread import serving

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "clients"
SETTINGS = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "input.sequence_length": 32,
    "input.batch_size": 8,
    "evaluators": {},
}
SIZES = {"runner.max_rows": 2, "runner.max_context": 4096, "runner.row_buckets": (), "runner.chunk_buckets": ()}
WEATHER = json.loads(WeatherScript.arguments)
TOOL = [WEATHER, WeatherScript.answer]
EXPECTED = {
    "text": WeatherScript.answer,
    "stream": WeatherScript.answer,
    "reasoning": "Hm.",
    "tool": TOOL,
    "streamed_tool": TOOL,
    "streamed_call": WEATHER,
    "required": WEATHER,
    "structured": WEATHER,
    "streamed_structured": WEATHER,
    "structured_without_schema": WEATHER,
    "tokens": len("<|user|><|assistant|>"),
}
"""Kind of request -> result with the scripted model."""
ALL = "text stream reasoning tool streamed_tool required structured"
HIDES_REASONING = "text stream tool streamed_tool required structured"
CLIENTS = {
    "use_ai_sdk.mjs": {"chat": ALL, "output": "structured"},
    "use_anthropic.py": {"messages": ALL, "runner": "tool", "count": "tokens"},
    "use_huggingface_hub.py": {"chat": "text stream reasoning tool streamed_call required structured"},
    "use_instructor.py": {
        "tools": "structured streamed_structured",
        "json_schema": "structured",
        "json": "structured_without_schema",
        "responses": "structured",
    },
    "use_langchain.py": {"chat": HIDES_REASONING, "responses": HIDES_REASONING, "functions": "structured"},
    "use_litellm.py": {"chat": ALL},
    "use_llm.py": {
        "chat": "text stream tool streamed_tool structured",
        "responses": "stream streamed_tool structured",
    },
    "use_openai.mjs": {"chat": ALL, "responses": "text stream tool structured"},
    "use_openai.py": {"chat": ALL, "responses": ALL, "completions": "structured"},
    "use_openai_agents.py": {"chat": ALL, "responses": ALL},
    "use_pydantic_ai.py": {"chat": ALL, "responses": ALL},
}
"""Script -> way of calling the server -> kinds of requests."""
RANDOM = ("text", "stream", "required", "structured", "streamed_structured")
"""Kinds of requests that any model can answer."""
RANDOM_JSON = RANDOM[2:]
RAISES_IF_CUT_OFF = "use_openai_agents.py"
"""The script of a client that raises an error if a limit cuts a text off, as it must with a random model."""


@pytest.fixture(scope="module")
def cache(pytestconfig):
    return Path(pytestconfig.cache.mkdir("clients"))


@pytest.fixture(params=CLIENTS)
def client(request, cache):
    """The name of a script, and the command that runs it."""
    script = request.param
    if script.endswith(".mjs"):
        return script, ["node", str(node_environment(cache, FOLDER / "package.json") / script)]
    return script, [str(python_environment(cache, FOLDER / "requirements.txt")), str(FOLDER / script)]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return hermes_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def scripted(template):
    limits = ServerLimits(api_keys=("any",))
    with serving(FakeEngine(script=WeatherScript(), max_context=8192), template=template, limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory, template):
    """A server of a model that has learned nothing, with Hermes's tool calls and without reasoning."""
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    ax.train("quickstart", run_dir=directory, steps=3, set=SETTINGS)
    model = open_engine(directory, config=patch(ServingEngine.Config(), SIZES))
    with serving(model.engine, tokenizer=model.tokenizer, template=template, reasoning_parser="none") as server:
        yield server


def test_every_script_runs():
    assert {path.name for path in FOLDER.glob("use_*")} == set(CLIENTS)


def test_a_client_gets_what_a_scripted_model_writes(client, scripted):
    script, command = client
    report = run_script(command, scripted.url, list(EXPECTED), 300)
    assert report == {way: {kind: EXPECTED[kind] for kind in kinds.split()} for way, kinds in CLIENTS[script].items()}


def test_a_client_gets_text_and_valid_json_from_any_model(client, trained):
    script, command = client
    tried = RANDOM_JSON if script == RAISES_IF_CUT_OFF else RANDOM
    report = run_script(command, trained.url, list(tried), 16)
    for way, kinds in CLIENTS[script].items():
        assert set(report[way]) == {kind for kind in kinds.split() if kind in tried}
        for kind, result in report[way].items():
            if kind in ("text", "stream"):
                assert isinstance(result, str), (way, kind)
            else:
                assert set(result) == {"city", "days"}, (way, kind)
                assert result["city"] in ("Rome", "Oslo"), (way, kind)
                assert result["days"] in (1, 2, 3), (way, kind)
