"""Long conversations with tools: the prefix cache covers the tokens that a turn shares with the turn before."""

import itertools
import re

import httpx
import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import open_engine
from support.benchmark_scripts import load_benchmark
from support.scripted_models import WEATHER, hermes_template
from support.server_thread import serving

TURNS, BLOCK = 30, 32
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MODES = {
    "required": {"tool_choice": "required", "parallel_tool_calls": False},
    "format-of-the-model": {"structured_outputs": {"regex": re.escape(CALL)}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = {
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "input.sequence_length": 32,
        "input.batch_size": 8,
        "evaluators": {},
    }
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    ax.train("quickstart", run_dir=directory, steps=3, set=settings)
    sizes = {"runner.max_rows": 2, "runner.max_context": 8192, "runner.block_size": BLOCK}
    model = open_engine(directory, config=patch(ServingEngine.Config(), sizes))
    template = hermes_template(directory)
    # a random model would begin to reason, and never end
    with serving(model.engine, tokenizer=model.tokenizer, template=template, reasoning_parser="none") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_turn_reuses_what_the_turn_before_computed(server, mode):
    agent = load_benchmark("agent_conversation")
    function = {**WEATHER["function"], "parameters": PARAMETERS}
    body = {"tools": [{"type": "function", "function": function}], "max_tokens": 200, "seed": 5, **MODES[mode]}
    first = [
        {"role": "system", "content": f"You plan journeys ({mode})."},
        {"role": "user", "content": "Where is it warm?"},
    ]
    results = [f'{{"sky": "sunny", "degrees": {10 + turn}, "wind": "light"}}' for turn in range(TURNS)]
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
        turns = list(agent.converse(client, first, results, body))
    assert len(turns) == TURNS
    for before, turn in itertools.pairwise(turns):
        shared = turn.count_shared(before)
        assert turn.cached == shared // BLOCK * BLOCK
        reused = len(before.output) - 1 if mode == "format-of-the-model" else 0  # a required call has another syntax
        assert shared >= len(before.prompt) + reused
