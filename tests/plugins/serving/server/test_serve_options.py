"""The options of `axlearn serve`, on the command line and in files, and what they set."""

import logging

import click
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_plugins_serving.open_engine import OpenedEngine
from axlearn_plugins_serving.server.command import serve
from axlearn_plugins_serving.server.server_log import log
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support.fake_engine import FakeEngine


class Started:
    """The parts of a server that a command started.

    Attributes:
        result: Result of the command.
        uri: Model that was opened.
        config: Config of the engine.
        service: The served model.
        limits: Limits of the server.
        options: Other options of the server.
    """

    result = uri = config = service = limits = options = None


@pytest.fixture
def start(monkeypatch):
    """Return a function that runs the command with a fake engine and a fake server, and returns what it started."""
    started = Started()

    def open_engine(uri, *, config, prepare_text, **options):
        started.uri, started.config = uri, config
        engine = FakeEngine()
        engine.adapters = ()
        text = TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
        return OpenedEngine(engine, prepare_text(text), "tiny")

    class Recorder:
        def __init__(self, service, limits, **options):
            started.service, started.limits, started.options = service, limits, options

        async def run(self, listener, ready):
            ready()
            log.debug("a detail")
            return 0

    monkeypatch.setattr("axlearn_plugins_serving.engine_devices.set_up_devices", lambda *args, **options: None)
    monkeypatch.setattr("axlearn_plugins_serving.open_engine.open_engine", open_engine)
    monkeypatch.setattr("axlearn_plugins_serving.server.server_runner.ServerRunner", Recorder)

    def run(*words, uri="runs/any", port=("--port", "0")):
        started.result = CliRunner().invoke(cli, ["serve", *([uri] if uri else []), *port, *words])
        return started

    return run


def refuse(start, *words, **more):
    result = start(*words, **more).result
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def test_names_keys_and_paths(start):
    words = ["--served-model-name", "a", "--served-model-name", "b", "--api-key", "k1", "--api-key", "k2"]
    started = start(*words, "--root-path", "/llm/", "--tool-parser", "hermes", "--reasoning-parser", "think")
    assert started.result.exit_code == 0, started.result.output
    assert (started.service.name, started.service.aliases) == ("a", ("b",))
    assert (started.service.tool_parser, started.service.reasoning_parser) == ("hermes", "think")
    assert started.limits.api_keys == ("k1", "k2")
    assert started.limits.hosts is None
    assert started.limits.root_path == "/llm"
    assert started.result.stdout.startswith("a at http://127.0.0.1:")


def test_keys_of_both_kinds(start, monkeypatch):
    monkeypatch.setenv("SERVE_KEY", "k2")
    assert start("--api-key", "k1", "--api-key-env", "SERVE_KEY").limits.api_keys == ("k1", "k2")
    assert start().limits.api_keys == ()


def test_what_clients_may_change(start, tmp_path):
    service = start("--allow-sleep", "--allow-adapters", "--response-store", str(tmp_path / "responses.db")).service
    assert (service.allows_sleep, service.allows_adapters) == (True, True)
    assert (tmp_path / "responses.db").exists()
    service = start().service
    assert (service.allows_sleep, service.allows_adapters) == (False, False)


def test_the_context_length_is_a_setting_of_the_runner(start):
    assert start("--max-model-len", "256").config.runner.max_context == 256
    assert start("--max-model-len", "256", "--set", "serving.runner.max_context=64").config.runner.max_context == 64


def test_a_unix_socket_is_removed_at_the_end(start, tmp_path):
    path = tmp_path / "socket"
    started = start("--uds", str(path), port=())
    assert started.result.exit_code == 0, started.result.output
    assert started.result.stdout == f"runs/any at unix:{path}\n"
    assert started.limits.hosts is None  # no web page can connect
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (["https://a.example", "http://b.example:8080"], ("https://a.example", "http://b.example:8080")),
        (["*"], ("*",)),
        (['["https://a.example/", "*"]'], ("https://a.example", "*")),
        ([], ()),
    ],
)
def test_origins(start, words, origins):
    assert start(*[word for origin in words for word in ("--allowed-origins", origin)]).limits.origins == origins


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--allowed-origins", "a.example"], "is not an origin"),
        (["--allowed-origins", "https://a.example/path"], "is not an origin"),
        (["--allowed-origins", '["https://a.example", 7]'], "'7' is not an origin"),
        (["--allowed-origins", "[broken"], "is not an origin"),
        (["--root-path", "llm"], "does not begin with a slash"),
        (["--served-model-name", "a", "--served-model-name", "a"], "given twice"),
        (["--served-model-name", " "], "is empty"),
        (["--served-model-name", "a", "--served-model-name", "b", "--adapter", "b=x"], "the same name"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "schlüssel"], "not ASCII"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--max-model-len", "8k"], "--max-model-len"),
        (["--log-level", "loud"], "--log-level"),
        (["--log-format", "xml"], "--log-format"),
        (["--uds", "socket"], "--uds cannot be combined with --port"),
        (["--replicas", "2", "--otlp-traces-endpoint", "http://a"], "--otlp-traces-endpoint"),
        (["--replicas", "2", "--response-store", "r.sqlite"], "each replica would have its own store"),
        (["--engine", "vllm", "--root-path", "/a"], "--engine vllm does not support --root-path"),
        (["--engine", "vllm", "--api-key", "a", "--api-key", "b"], "supports one API key"),
    ],
)
def test_values_that_are_wrong(start, words, says):
    assert says in refuse(start, *words)


def test_levels_and_formats_of_the_log(start):
    text = start("--log-level", "debug").result.stderr
    assert "a detail\n" in text
    assert "ready after" in text
    assert start("--log-level", "warning").result.stderr == ""
    lines = start("--log-format", "json").result.stderr.splitlines()
    assert all(line.startswith('{"time": ') for line in lines)
    assert any('"message": "ready after' in line for line in lines)
    assert logging.getLogger("axlearn").propagate  # restored


def test_an_error_of_a_start_is_a_line_of_the_log(start):
    stderr = refuse(start, "--log-format", "json", "--allowed-origins", "a")
    assert '"level": "error", "message": "--allowed-origins ' in stderr
    assert len(stderr.splitlines()) == 1


def write(tmp_path, text):
    (tmp_path / "serve.yaml").write_text(text)
    return str(tmp_path / "serve.yaml")


def test_a_file_sets_options_and_the_engine(start, tmp_path):
    file = write(
        tmp_path,
        """
model: runs/other
port: 0
served-model-name: [a, b]
api-key: secret
log-requests: true
grace: 7
max-queue: 9
serving:
  runner: {max_rows: 4, max_context: 512}
  prefix_cache: false
""",
    )
    started = start("--config", file, uri=None, port=())
    assert started.result.exit_code == 0, started.result.output
    assert started.uri == "runs/other"
    assert (started.service.name, started.service.aliases) == ("a", ("b",))
    assert started.limits.api_keys == ("secret",)
    assert started.options["grace"] == 7.0
    runner = started.config.runner
    assert (runner.max_rows, runner.max_context, started.config.max_waiting) == (4, 512, 9)
    assert started.config.prefix_cache is False


def test_the_command_line_wins_over_a_file(start, tmp_path):
    file = write(
        tmp_path,
        "served-model-name: a\nport: 1\ngrace: 7\nserving: {max_waiting: 5, runner.max_rows: 4, runner.chunk: 16}",
    )
    started = start(
        "--config", file, "--served-model-name", "b", "--grace", "3", "--set", "serving.max_waiting=6",
        "--set", "serving.runner={max_rows: 2}",
    )  # fmt: skip
    assert started.result.exit_code == 0, started.result.output
    assert (started.service.name, started.options["grace"], started.config.max_waiting) == ("b", 3.0, 6)
    assert (started.config.runner.max_rows, started.config.runner.chunk) == (2, 32)


def test_an_empty_file_sets_nothing(start, tmp_path):
    assert start("--config", write(tmp_path, "# nothing\n")).result.exit_code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "served-model-nam: a",
            "serve.yaml:1: unknown option 'served-model-nam'\n    did you mean: served-model-name",
        ),
        ("max_queue: 4", "did you mean: max-queue"),
        ("\nconfig: other.yaml", "serve.yaml:2: unknown option 'config'"),
        ("set: [serving.max_waiting=4]", "write settings of the engine under `serving`"),
        ("port: http", "serve.yaml:1: port: 'http' is not a valid integer"),
        ("port: 70000", "port: 70000 is not in the range"),
        ("port: [1, 2]", "port: expected text or a number"),
        ("port: 80.5", "port: '80.5' is not a valid integer"),
        ("log-requests: 1", "log-requests: expected true or false"),
        ("api-key: 0123", "api-key: expected text"),
        ("api-key: [a, {b: c}]", "a list of them"),
        ("host:", "host: expected text or a number"),
        ("log-level: loud", "log-level: 'loud' is not one of"),
        ("- port", "expected options as NAME: VALUE"),
        ("serving: 4", "serving: expected settings of the engine"),
        ("serving:\n  max_wating: 4", "serve.yaml:2: serving.max_wating: "),
        ("serving:\n\n  runner: {max_rows: many}", "serve.yaml:3: serving.runner.max_rows: "),
        ("port: {", "serve.yaml"),
        ("port: 1\nport: 2", "is a duplicate key"),
    ],
)
def test_files_that_are_wrong(start, text, says, tmp_path):
    assert says in refuse(start, "--config", write(tmp_path, text))


def test_files_that_cannot_be_read(start, tmp_path):
    assert "No such file" in refuse(start, "--config", str(tmp_path / "none.yaml"))
    assert "--config" in refuse(start, "--config", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "--config" in refuse(start, "--config", str(tmp_path / "binary"))


def test_the_help_names_each_option_once_and_stays_short():
    text = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=80).output
    options = [param for param in serve.params if isinstance(param, click.Option)]
    for param in options:
        assert text.count(f"\n  {param.opts[0]} ") == 1, param.opts[0]
    assert len(text.splitlines()) <= 2 * len(options)
    assert max(map(len, text.splitlines())) <= 80
