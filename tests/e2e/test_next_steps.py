"""Every command that is printed after `try next:` runs as printed."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.plugins.request import Request, format_value, parse_setting
from axlearn_core.plugins.resolve import resolve

MODELS = Path(__file__).parents[1] / "plugins/models/huggingface/fixtures"
SMALL = [
    word
    for setting in (
        "model.decoder.num_layers=1",
        "model.decoder.hidden_dim=32",
        "model.decoder.layer.attention.num_heads=2",
        "input.batch_size=8",
        "input.sequence_length=64",
        "evaluators={}",
    )
    for word in ("--set", setting)
]
SHORT = {"train": ["--steps", "2", "--set", "input.batch_size=8"], "generate": ["--max-tokens", "2"]}
"""More arguments, so that a command is fast."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    home = tmp_path / "my folder"
    home.mkdir()
    monkeypatch.chdir(home)
    return home


def axlearn(*words):
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, (words, result.output)
    return result


def next_steps(*words):
    """Run a command and return the commands that it suggests."""
    lines = axlearn(*words).stderr.splitlines()
    return [line.strip() for line in lines[lines.index("try next:") + 1 :]]


def run_next(command, data="text.txt"):
    """Run a suggested command. Fill in the data, and shorten the work."""
    program, *words = shlex.split(command.replace("input.source.paths=...", f"input.source.paths={data}"))
    assert program == "axlearn"
    if words[0] == "serve":
        serve(words)
    else:
        axlearn(*words, *SHORT.get(words[0], []))


def serve(words):
    sizes = ["--set", "serving.runner.max_rows=2", "--set", "serving.runner.max_context=64"]
    command = [sys.executable, "-m", "axlearn_core", *words, "--port", "0", *sizes]
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert re.search(r" at http://127\.0\.0\.1:\d+$", process.stdout.readline().rstrip())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "reading the weights\n" in errors
    assert "compiling the programs\n" in errors
    assert "Traceback" not in errors


def commands(steps):
    return [" ".join(shlex.split(step)[1:3] if " config " in step else shlex.split(step)[1:2]) for step in steps]


@pytest.mark.slow
def test_after_a_first_run_and_after_its_move(folder):
    words = ["train", "quickstart", *SMALL, "--with", "rope:theta=5000", "--steps", "2", "--run-dir", "my run"]
    steps = next_steps(*words)
    assert commands(steps) == ["generate", "report", "config explain"]
    assert "--prompt 'Once upon a time'" in steps[0]  # evaluators={} removed the experiment's own prompt
    for step in steps:
        run_next(step)
    shutil.move("my run", "elsewhere")
    moved = next_steps("train", "elsewhere/config.yaml", "--run-dir", "elsewhere", "--steps", "3")
    assert commands(moved) == ["generate", "report", "config explain"]
    for step in moved:
        run_next(step)
    converted = next_steps("convert", "elsewhere", "with experts", "--with", "moe:num_experts=2,top_k=1")
    assert commands(converted) == ["generate", "train"]
    for step in converted:
        run_next(step)


@pytest.mark.slow
def test_after_an_import_and_after_tuning_it_to_chat(folder):
    Path("text.txt").write_text("w1 w2 w3 w4 w5\n" * 200)
    steps = next_steps("checkpoint", "import-hf", str(MODELS / "qwen3"), "base")
    assert commands(steps) == ["generate", "train"]
    talk = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]}
    Path("talks.jsonl").write_text(json.dumps(talk) + "\n")
    tune = ["train", "base/config.yaml", "--with", "chat:data=talks.jsonl", "--with", "lora:rank=2,base=base"]
    few = ["--set", "evaluators={}", "--set", "input.batch_size=8", "--steps", "2", "--run-dir", "tuned"]
    tuned = next_steps(*tune, *few)
    assert commands(tuned) == ["serve", "report", "config explain"]
    lock = json.loads(Path("tuned/run.lock.json").read_text())
    assert 0 < lock["trained_parameters"] < lock["parameters"] / 10
    for step in [*tuned, *steps]:
        run_next(step)


@pytest.mark.parametrize(
    "text",
    ["a", "data/*.jsonl", "*.layer", "1", "null", "true", "a, b", "x: y", "it's", '"', "", "é", "{a: 1}", "#", "a b"],
)
def test_values_of_settings_are_written_as_they_are_read(text):
    for value in (text, [text, 1], {"a": text, "b": [0.5, None, True]}):
        assert parse_setting(f"path={format_value(value)}").value == value


def test_the_words_of_a_request_make_the_same_request():
    words = {
        "with_": ["rope:theta=5000", "freeze:pattern=[decoder.embedding.**, decoder.layer.*norm.*]"],
        "set": ["max_steps=7", "input.source={type: files, paths: [a.txt, 'b c.txt']}", "evaluators={}"],
    }
    request = Request.from_arguments("quickstart", **words)
    again = request.words
    parsed = {
        option: [again[i + 1] for i, word in enumerate(again) if word == option] for option in ("--with", "--set")
    }
    assert again[0] == "quickstart"
    expected = resolve(request).config
    assert resolve("quickstart", with_=parsed["--with"], set=parsed["--set"]).config == expected
