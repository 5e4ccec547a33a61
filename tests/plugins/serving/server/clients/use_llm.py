"""The command `llm`."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weather import API, JSON_LIMIT, MODEL, PARAMETERS, QUESTION, TEXT_LIMIT, report

FUNCTION = '''
def get_weather(city: str, days: int) -> str:
    """Return the weather."""
    return "sun"
'''


def llm(*options, limit=TEXT_LIMIT):
    command = [Path(sys.executable).with_name("llm"), QUESTION, "-m", MODEL, "-o", "max_tokens", str(limit), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return result.stdout


def tool(*options):
    path = folder / "call.json"
    write = f"import json, pathlib; pathlib.Path({str(path)!r}).write_text(json.dumps({{'city': city, 'days': days}}))"
    answer = llm("--functions", FUNCTION.replace('return "sun"', f'{write}\n    return "sun"'), *options)
    return [json.loads(path.read_text()), answer.removeprefix("One moment.").strip()]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    os.environ |= {"LLM_USER_PATH": name, "OPENAI_API_KEY": "any"}
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": API, "supports_tools": True, "supports_schema": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    report(
        chat={
            "text": lambda: llm("--no-stream").strip(),
            "stream": lambda: llm().strip(),
            "tool": lambda: tool("--no-stream"),
            "streamed_tool": tool,
            "structured": lambda: json.loads(llm("--schema", json.dumps(PARAMETERS), limit=JSON_LIMIT)),
        }
    )
