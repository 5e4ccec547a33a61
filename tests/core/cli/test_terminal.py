"""Control characters are removed from everything that commands print."""

import json
import os
import pty
import subprocess
import sys

import click
import pytest

from axlearn_core.cli.terminal import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ü, 😀\ttab\nline", "plain, ü, 😀\ttab\nline"),
        (f"{click.style('name', fg='cyan')}: {click.style('dim', dim=True)}", None),
        (click.style("red", fg="red", bold=True), None),
        ("a\x1b]0;title\x07b", "a\\x1b]0;title\\x07b"),
        ("\x1b[2J\x1b[1;1H", "\\x1b[2J\\x1b[1;1H"),
        ("hidden \x1b[8mtext", "hidden \\x1b[8mtext"),
        ("left \u202egnp.exe", "left \\u202egnp.exe"),
        ("over\rwritten", "over\\rwritten"),
    ],
)
def test_only_colours_pass(text, shown):
    assert visible(text) == (text if shown is None else shown)


def on_a_terminal(*command):
    """What a terminal would get, of both streams."""
    reads, writes = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "axlearn_core", *command], stdout=writes, stderr=writes)
    os.close(writes)
    parts = []
    while True:
        try:
            part = os.read(reads, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(reads)
    assert process.wait(60) == 0
    return b"".join(parts).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("diff", "quickstart", "FILE"), ("explain", "FILE", "input.source"), ("show", "FILE", "--flat")]
)
def test_values_do_not_steer_a_terminal(command, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text('experiment: quickstart\nset:\n  input.source: {type: files, paths: "a\\e[2Jb.txt"}\n')
    text = on_a_terminal("config", *(str(file) if word == "FILE" else word for word in command))
    assert "\x1b[2J" not in text
    assert "a\\x1b[2Jb.txt" in text
    assert "\x1b[3" in text  # and colours are


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a\u202eb.txt", "a\x1b[2Jb.txt", "a\x1b]0;title\x07b.txt"])
def test_a_pipe_gets_values_as_they_are(tmp_path, name):
    file = tmp_path / "run.yaml"
    setting = {"experiment": "quickstart", "set": {"input.source": {"type": "files", "paths": name}}}
    file.write_text(json.dumps(setting))
    command = [sys.executable, "-m", "axlearn_core", "config", "show", str(file), "--flat"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"input.source.paths: {name}\n" in text  # without colours
