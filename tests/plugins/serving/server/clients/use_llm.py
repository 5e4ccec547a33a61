"""The command `llm`: chat and responses."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weather import API, JSON_LIMIT, MODEL, PARAMETERS, QUESTION, TEXT_LIMIT, report

RESPONSES = f"{MODEL}-responses"
"""A second name of the model, with which `llm` uses `/v1/responses`."""
FUNCTION = '''
def get_weather(city: str, days: int) -> str:
    """Return the weather."""
    return "sun"
'''


def llm(*options, model=MODEL, limit=TEXT_LIMIT):
    command = [Path(sys.executable).with_name("llm"), QUESTION, "-m", model, "-o", "max_tokens", str(limit), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout.strip()


def tool(*options, **fields):
    path = folder / "call.json"
    write = f"import json, pathlib; pathlib.Path({str(path)!r}).write_text(json.dumps({{'city': city, 'days': days}}))"
    function = FUNCTION.replace('return "sun"', f'{write}\n    return "sun"')
    answer = llm("--functions", function, *options, **fields)
    return [json.loads(path.read_text()), answer.removeprefix("One moment.").strip()]


def structured(**fields):
    return json.loads(llm("--schema", json.dumps(PARAMETERS), limit=JSON_LIMIT, **fields))


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    os.environ["LLM_USER_PATH"] = name
    fields = {"model_name": MODEL, "api_base": API, "api_key_name": "axlearn"}
    fields |= {"supports_tools": True, "supports_schema": True}
    models = [{"model_id": MODEL, **fields}, {"model_id": RESPONSES, "responses": True, **fields}]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
    (folder / "keys.json").write_text(json.dumps({"axlearn": "any"}))
    report(
        chat={
            "text": lambda: llm("--no-stream"),
            "stream": llm,
            "tool": lambda: tool("--no-stream"),
            "streamed_tool": tool,
            "structured": structured,
        },
        responses={
            "stream": lambda: llm(model=RESPONSES),
            "streamed_tool": lambda: tool(model=RESPONSES),
            "structured": lambda: structured(model=RESPONSES),
        },
    )
