"""The commands on configs and on what is installed, called in this process."""

import json

import pytest
from click.testing import CliRunner, Result

from axlearn_core.cli.main import COMMANDS, cli

pytestmark = pytest.mark.usefixtures("toy")


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli, words, prog_name="axlearn")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def good(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def bad(*words: str, code: int = 2) -> str:
    result = run(*words)
    assert result.exit_code == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_show_prints_a_file_that_can_be_used(tmp_path):
    text = good("config", "show", "toy", "--with", "toy-rope:theta=5", "--set", "model.num_layers=4")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert "\x1b" not in text
    assert good("config", "show", str(file)) == text
    assert good("config", "diff", "toy", str(file)).splitlines() == [
        "~ model.num_layers: 2 -> 4",
        "~ model.attention.position.type: toy-noposition -> toy-rotary",
        "+ model.attention.position.theta: 5.0",
    ]


def test_show_flat_and_json():
    flat = good("config", "show", "toy", "--flat", "--set", "tags=[a]").splitlines()
    assert "model.attention.num_heads: 4" in flat
    assert "model.attention.num_kv_heads: null" in flat
    assert flat[0] == "type: toy-trainer"
    rows = json.loads(good("config", "show", "toy", "--json", "--set", "tags=[a]"))
    assert {"name": "tags", "value": ["a"]} in rows
    assert len(rows) == len(flat)


def test_show_names_what_is_still_to_be_set():
    result = run("config", "show", "unfinished")
    assert result.exit_code == 0
    assert result.stderr == "not set: model.num_layers\n"
    assert "num_layers" not in result.stdout


def test_diff():
    assert good("config", "diff", "toy", "toy") == ""
    rows = json.loads(good("config", "diff", "toy", "toy", "--with", "toy-moe:num_experts=2", "--steps", "3", "--json"))
    assert {"name": "max_steps", "kind": "changed", "old": 100, "new": 3} in rows
    assert {"name": "model.feed_forward.num_experts", "kind": "added", "old": None, "new": 2} in rows


def test_explain():
    words = ("config", "explain", "toy", "max_steps", "--set", "max_steps=3")
    assert good(*words).splitlines() == [
        "max_steps: 3",
        "    100  experiment toy (axlearn-plugins-toy 0.3)",
        "    3    --set max_steps=3",
    ]
    (row,) = json.loads(good(*words, "--json"))
    assert row["name"] == "max_steps"
    assert row["steps"][1] == {"who": "--set max_steps=3", "old": 100, "new": 3}
    below = good("config", "explain", "toy", "model.attention", "--with", "toy-rope")
    assert "model.attention.num_heads: 4" in below
    assert "toy-rotary      feature toy-rope (axlearn-plugins-toy 0.3)" in below
    assert "max_steps" not in below
    removed = good("config", "explain", "toy", "model.feed_forward.hidden_dim.factor", "--set", "**.hidden_dim=64")
    assert "(removed)" in removed
    assert "did you mean: max_steps?" in bad("config", "explain", "toy", "max_stps")
    replaced = good("config", "explain", "toy", "model.feed_forward", "--set", "model.feed_forward.hidden_dim=64")
    assert replaced.splitlines()[-1].startswith("replaced: model.feed_forward.hidden_dim (scaled(factor=4.0, ")
    assert "replaced" not in good(
        "config", "explain", "toy", "model.attention", "--set", "model.feed_forward.hidden_dim=64"
    )


def test_check():
    assert "values are set and consistent" in good("config", "check", "toy")
    assert good("config", "check", "toy", "--json").strip() == "[]"
    message = bad("config", "check", "unfinished", "--set", "model.attention.num_kv_heads=3")
    assert message.startswith("error: model.num_layers: ")
    assert "model.attention.num_kv_heads: does not divide num_heads" in message
    result = run("config", "check", "unfinished", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)[0]["name"] == "model.num_layers"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["config", "show", "toyy"], ["unknown experiment 'toyy'", "did you mean: toy", "axlearn experiments list"]),
        (["config", "show", "toy", "--with", "toy-rop"], ["unknown feature 'toy-rop'", "did you mean: toy-rope"]),
        (["config", "show", "toy", "--with", "toy-rope:teta=1"], ["toy-rope.teta: unknown key", "theta"]),
        (["config", "show", "toy", "--set", "max_step=1"], ["max_step: no 'max_step'", "did you mean: max_steps"]),
        (["config", "show", "toy", "--set", "max_steps=1.5"], ["max_steps: wrong type", "1.5 (float)", "int"]),
        (["config", "show", "toy", "--set", "max_steps"], ["expected PATH=VALUE"]),
        (
            ["config", "show", "toy", "--set", "model.attention.type=toy-rotary"],
            ["model.attention.type: no 'type'", "'model.attention={type: toy-rotary}'"],
        ),
        (["config", "show", "nowhere.yaml"], ["cannot read nowhere.yaml: No such file"]),
        (["config", "show"], ["Missing argument", "EXPERIMENT|FILE.yaml"]),
        (["config", "show", "toy", "--sett", "a=1"], ["No such option", "--set"]),
        (["config", "show", "toy", "--steps", "0"], ["0 is not in the range"]),
        (["confg", "show"], ["No such command 'confg'", "config"]),
        (["import-hf"], ["No such command 'import-hf'", "Did you mean: checkpoint import-hf"]),  # below another word
        (["features", "show", "toy-rop"], ["did you mean: toy-rope"]),
        (["plugins", "show", "axlearn-plugins-toyy"], ["unknown plugin", "did you mean: axlearn-plugins-toy"]),
    ],
)
def test_bad_requests(words, expected):
    message = bad(*words)
    for part in expected:
        assert part in message


def test_lists():
    assert "toy " in good("experiments", "list")
    rows = json.loads(good("experiments", "list", "--json"))
    (toy,) = [row for row in rows if row["name"] == "toy"]
    assert toy.items() >= {"distribution": "axlearn-plugins-toy", "version": "0.3", "value": "toy_parts:toy"}.items()
    (quickstart,) = [row for row in rows if row["name"] == "quickstart"]
    assert quickstart["parameters"] == "1.38M"
    assert quickstart["summary"].startswith("Train a small Llama")
    names = [row["name"] for row in json.loads(good("features", "list", "--json"))]
    assert names == sorted(names)
    assert "toy-rope" in names
    rows = json.loads(good("plugins", "list", "--json"))
    (toy,) = [row for row in rows if row["name"] == "axlearn-plugins-toy"]
    assert toy["experiments"] == ["toy", "unfinished"]
    assert "2 experiments" in good("plugins", "list")


def test_features_show():
    text = good("features", "show", "toy-rope")
    for part in ("Rotary position embeddings.", "On an experiment that has them", "theta: float", "10000.0", "replace"):
        assert part in text
    assert "toy-wide" in good("features", "show", "toy-moe")
    assert "num_experts: int  (required)" in good("features", "show", "toy-moe")
    (row,) = json.loads(good("features", "show", "toy-moe", "--json"))
    assert row["excludes"] == ["toy-wide"]
    assert row["options"][0] == {"name": "num_experts", "type": "int", "default": "REQUIRED"}


def test_plugins_show():
    text = good("plugins", "show", "axlearn-plugins-toy")
    assert "toy-attention" in text
    assert "toy_parts:Attention" in text
    (row,) = json.loads(good("plugins", "show", "toy-attention", "--json"))
    assert row["group"] == "components"


HOOK = "@hookimpl\ndef axlearn_targest():\n    return []"


def test_commands_of_plugins(install):
    install(
        "axlearn-plugins-say",
        "4.0",
        modules={"say_part": SAY},
        points={"commands": {"say": "say_part:say", "number": "say_part:NUMBER"}},
    )
    assert "say          (axlearn-plugins-say 4.0)" in good("--help")
    assert good("say", "hello") == "hello\n"
    assert "did you mean" in bad("sayy").lower()
    assert "is not a click command" in bad("number")
    assert bad("say", "work", code=1) == "error: the disk is full\n"
    assert bad("say", "request") == "error: what?\n"
    assert run("say", "interrupt").exit_code == 130


SAY = """
import click
from axlearn_core.errors import RequestError, WorkError

@click.command()
@click.argument("word")
def say(word):
    if word == "work":
        raise WorkError("the disk is full")
    if word == "request":
        raise RequestError("what?")
    if word == "interrupt":
        raise KeyboardInterrupt
    click.echo(word)

NUMBER = 5
"""


def test_a_plugin_cannot_take_a_command_of_the_core(install):
    install("axlearn-plugins-thief", modules={"thief": "config = 1"}, points={"commands": {"config": "thief:config"}})
    assert "axlearn-plugins-thief 1.0 registers the command 'config'" in bad("config", "show", "toy")
    assert "Show, compare" in good("--help")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_of_the_table_is_there_and_has_help(name):
    assert "Usage: axlearn " + name in good(name, "--help")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raises", ["cannot be loaded", "OSError: no driver", "axlearn-plugins-raises 1.0"]),
        ("future", ["requires axlearn-core >=99", "is installed", "fix:"]),
        (
            "toy-rope",
            ["2 distributions register the feature 'toy-rope'", "axlearn-plugins-twin", "axlearn-plugins-toy"],
        ),
    ],
)
def test_plugins_that_do_not_work_stop_the_command_that_asks_for_them(install, name, expected):
    bad_part = {"ill_part": "raise OSError('no driver')"}
    install("axlearn-plugins-raises", modules=bad_part, points={"features": {"raises": "ill_part:X"}})
    install("axlearn-plugins-future", points={"features": {"future": "x:X"}}, requires=("axlearn-core>=99",))
    install("axlearn-plugins-twin", points={"features": {"toy-rope": "x:X"}})
    message = bad("config", "show", "toy", "--with", name)
    for part in expected:
        assert part in message
    assert "max_steps" in good("config", "show", "toy", "--with", "toy-wide")  # and no other


def test_a_misspelled_hook_stops_commands_that_need_hooks_and_no_others(install):
    source = f"import click\nfrom axlearn_core import hookimpl\nfrom axlearn_core.plugins.manager import host\n{HOOK}\n"
    source += "@click.command()\ndef needs():\n    host()"
    points = {"plugins": {"odd": "odd_part"}, "commands": {"needs-hooks": "odd_part:needs"}}
    install("axlearn-plugins-odd", modules={"odd_part": source}, points=points)
    message = bad("needs-hooks")
    assert "'axlearn_targest', which does not exist\n    did you mean: axlearn_targets" in message
    assert "axlearn-plugins-odd 1.0" in message
    good("config", "show", "toy")
