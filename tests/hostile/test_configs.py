"""Configs that attack the parser: one error and exit code 2, before JAX starts if the parser can reject them."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.config import patch
from axlearn_core.errors import ConfigError
from support.hostile_configs import FILES, SETTINGS

MEASURED = """
import json, re, sys
from pathlib import Path
from axlearn_core.cli.main import cli
try:
    cli(sys.argv[1:], standalone_mode=True)
except SystemExit as end:
    code = end.code
# Not `ru_maxrss`: that begins with what the process had that this one was forked from.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
print(json.dumps({"code": code, "jax": "jax" in sys.modules, "megabytes": peak}))
"""
LATE = ("10,000 settings", "10,000 fields", "set of nothing", "features of numbers", "an experiment of numbers")
"""What is known to be wrong only beside the experiment, whose layers import JAX."""


def check_error(result):
    assert result.exit_code == 2, result.output[-3000:]
    assert isinstance(result.exception, SystemExit)
    assert "error:" in result.stderr
    assert len(result.stderr.splitlines()) <= 110  # 20 problems
    assert max(map(len, result.stderr.splitlines())) < 20_000


@pytest.mark.slow_cases("10,000 fields", "10,000 settings", "10,000 unknown keys", "nested lists")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_one_error(name, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(FILES[name])
    check_error(CliRunner().invoke(cli, ["config", "show", str(file)]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_one_error(setting):
    result = CliRunner().invoke(cli, ["config", "check", "quickstart", "--set", setting])
    check_error(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_parsing_refuses_it_before_jax_and_in_little_memory(name, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(FILES[name])
    process = subprocess.run(
        [sys.executable, "-c", MEASURED, "config", "show", str(file)], capture_output=True, text=True, timeout=60
    )
    actual = json.loads(process.stdout.splitlines()[-1])
    assert actual["code"] == 2
    if name not in LATE:
        assert not actual["jax"]
        assert actual["megabytes"] < 200


def make_directory(path):
    path.mkdir()


SPECIAL = {"pipe": os.mkfifo, "directory": make_directory, "device": lambda path: path.symlink_to("/dev/zero")}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "command", [("config", "show"), ("config", "check"), ("train",), ("config", "diff", "quickstart")]
)
def test_an_invalid_file_is_one_error(kind, command, tmp_path):
    file = tmp_path / "run.yaml"
    SPECIAL[kind](file)
    result = CliRunner().invoke(cli, [*command, str(file)])
    check_error(result)
    assert "Not a regular file" in result.stderr or "Is a directory" in result.stderr
    assert "did you mean" not in result.stderr


@pytest.mark.parametrize("name", ["config.yaml", "run.lock.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_directory_hangs_nothing(name, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / name)
    result = CliRunner().invoke(cli, ["checkpoint", "list", str(run)])
    assert result.exit_code in (1, 2)  # a file that cannot be read is work that failed
    assert isinstance(result.exception, SystemExit)


def test_only_twenty_problems_are_printed(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(FILES["10,000 unknown keys"])
    result = CliRunner().invoke(cli, ["config", "show", str(file)])
    assert "and 9,980 more problems (10,000 in all)" in result.stderr
    assert result.stderr.count("unknown key in a run file") == 20


def test_a_pattern_for_everything_sets_nothing():
    from axlearn_core.plugins.resolve import resolve

    with pytest.raises(ConfigError):
        patch(resolve("quickstart").config, {"**": 1})
