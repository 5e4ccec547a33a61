"""The options of `axlearn serve`: their declarations, sections in the help, and files that set them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

LEVELS = ("debug", "info", "warning", "error")
SETTINGS = "axlearn_plugins_serving.settings"
"""Key of the settings from a config file in `click.Context.meta`."""

_POSITIVE = click.IntRange(min=1)
SECTIONS: Mapping[str, Sequence[Any]] = {
    "Model": (
        click.option(
            "--served-model-name",
            "names",
            multiple=True,
            metavar="NAME",
            help="Name for clients; repeatable (default: directory name).",
        ),
        click.option("--chat-template", metavar="FILE|plain", help="Chat template (default: the model's own)."),
        click.option("--tool-parser", metavar="NAME|none", help="Parser for tool calls (default: by the template)."),
        click.option(
            "--reasoning-parser", metavar="NAME|none", help="Parser for reasoning (default: by the template)."
        ),
        click.option(
            "--adapter",
            "adapters",
            multiple=True,
            metavar="NAME=DIR",
            help="Serve exported adapters as the model NAME.",
        ),
        click.option("--step", type=_POSITIVE, metavar="N", help="Checkpoint to serve (default: newest)."),
        click.option(
            "--programs", metavar="DIR", help="Load programs (code) that `axlearn plan serve --export` wrote."
        ),
    ),
    "Engine": (
        click.option(
            "--max-model-len",
            type=click.IntRange(min=2),
            metavar="N",
            help="Context in tokens; sets serving.runner.max_context.",
        ),
        click.option(
            "--max-queue", type=_POSITIVE, metavar="N", help="Most waiting requests; sets serving.max_waiting."
        ),
        click.option(
            "--set", "set_", multiple=True, metavar="serving.PATH=VALUE", help="Set a value of the engine's config."
        ),
        click.option("--replicas", type=_POSITIVE, metavar="N", help="Number of replicas, run by Ray Serve."),
        click.option("--prefill", type=_POSITIVE, metavar="N", help="Number of prefill processes."),
        click.option("--decode", type=_POSITIVE, metavar="N", help="Number of decode processes."),
        click.option(
            "--engine",
            type=click.Choice(["axlearn", "vllm"]),
            default="axlearn",
            help="`vllm` runs an installed vLLM with the arguments after --.",
        ),
    ),
    "Server": (
        click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            metavar="PORT",
            default=8000,
            help="Port, or 0 for a free one (default: 8000).",
        ),
        click.option("--uds", metavar="PATH", help="Listen on a Unix socket instead."),
        click.option("--root-path", metavar="PATH", default="", help="Prefix that a proxy puts before the paths."),
        click.option(
            "--api-key",
            "api_keys",
            multiple=True,
            metavar="KEY",
            help="Key for clients; other users of this machine can see it.",
        ),
        click.option(
            "--api-key-env", metavar="VARIABLE", help="Environment variable with a key that clients must send."
        ),
        click.option(
            "--allowed-origins",
            "origins",
            multiple=True,
            metavar="ORIGIN",
            help="Let web pages of this origin use the server; repeatable.",
        ),
        click.option("--allow-sleep", is_flag=True, help="Let clients free the devices' memory with POST /sleep."),
        click.option("--allow-adapters", is_flag=True, help="Let clients load adapters from this machine's files."),
        click.option(
            "--response-store",
            metavar="FILE",
            help="Keep responses of /v1/responses in a SQLite file (default: memory).",
        ),
        click.option(
            "--max-body",
            type=click.IntRange(min=1024),
            metavar="BYTES",
            default=4 * 2**20,
            help="Largest request body (default: 4 MiB).",
        ),
        click.option(
            "--grace",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            default=30.0,
            help="Time for running requests after SIGTERM (default: 30).",
        ),
    ),
    "Logs and traces": (
        click.option("--log-requests", is_flag=True, help="Log each request."),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default="info",
            metavar="LEVEL",
            help="debug, info, warning or error (default: info).",
        ),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            help="Format of the log (default: text).",
        ),
        click.option("--otlp-traces-endpoint", metavar="URL", help="Send OpenTelemetry traces to this collector."),
    ),
}
"""Section of the help -> its options, in order."""


class ServeCommand(click.Command):
    """A command whose help has sections, and whose options a file can set."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section."""
        params = {param.name: param for param in self.get_params(ctx)}
        for title, options in SECTIONS.items():
            names = [_declared_name(option) for option in options]
            self._write_section(title, [params.pop(name) for name in names], ctx, formatter)
        others = [param for param in params.values() if isinstance(param, click.Option)]
        self._write_section("Other options", others, ctx, formatter)

    @staticmethod
    def _write_section(
        title: str, params: Sequence[click.Parameter], ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
        with formatter.section(title):
            formatter.write_dl(records, col_max=27)


def _declared_name(option: Callable[[Any], Any]) -> str:
    """Return the name of the parameter that a decorator of click declares."""

    def command() -> None:
        pass

    option(command)
    (param,) = command.__dict__["__click_params__"]
    return param.name


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all options to a command."""
    config = click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="YAML file of options; those on the command line win.",
    )
    for option in reversed([*(option for options in SECTIONS.values() for option in options), config]):
        command = option(command)
    return command


def _read_file(ctx: click.Context, _param: click.Parameter, file: str | None) -> None:
    """Use the options in a YAML file as defaults, and keep its engine settings in `ctx.meta`.

    Raises:
        ConfigError: If the file is not valid YAML.
        RequestError: If the file cannot be read, or has an unknown option or an invalid value.
    """
    if file is None:
        return
    from axlearn_core.config.yaml_file import parse
    from axlearn_core.errors import RequestError, reason
    from axlearn_core.plugins.request import Setting

    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {file}: {reason(error)}") from None
    document = parse(text, file)
    if document.data is None:
        return
    if not isinstance(document.data, dict):
        raise RequestError(f"{file}: expected options as NAME: VALUE")
    params = {
        opt.lstrip("-"): p for p in ctx.command.params for opt in p.opts if p.name not in ("config", "set_", "more")
    }
    params = {("model" if name == "uri" else name): param for name, param in params.items()}
    defaults: dict[str, Any] = {}
    for name, value in document.data.items():
        location = f"{file}:{document.lines.get(str(name), 1)}"
        if name == "serving":
            if not isinstance(value, dict):
                raise RequestError(f"{location}: serving: expected settings of the engine as NAME: VALUE")
            ctx.meta[SETTINGS] = tuple(
                Setting(path=f"serving.{path}", value=v, location=f"{file}:{document.lines.get(f'serving.{path}', 1)}")
                for path, v in value.items()
            )
            continue
        param = params.get(str(name))
        if param is None or param.name is None:
            raise _unknown_option_error(location, str(name), params)
        defaults[param.name] = _convert(param, value, ctx, f"{location}: {name}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _unknown_option_error(location: str, name: str, params: Mapping[str, Any]) -> Exception:
    from axlearn_core.errors import RequestError, nearest

    close = nearest(name, [*params, "serving"])
    hint = f"\n    did you mean: {', '.join(close)}?" if close else ""
    fix = (
        "\n    fix: write settings of the engine under `serving`"
        if name == "set" or name.startswith("serving.")
        else ""
    )
    return RequestError(f"{location}: unknown option {name!r}{hint}{fix}")


def _convert(param: click.Parameter, value: Any, ctx: click.Context, place: str) -> Any:
    """Check a value from a file, and return it as click expects a default."""
    from axlearn_core.errors import RequestError

    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise RequestError(f"{place}: expected true or false\n    got: {value!r}")
        return value
    several = isinstance(param, click.Option) and param.multiple
    values = value if several and isinstance(value, list) else [value]
    texts = []
    for v in values:
        if isinstance(v, bool) or not isinstance(v, str | int | float):
            expected = "text, a number, or a list of them" if several else "text or a number"
            raise RequestError(f"{place}: expected {expected}\n    got: {v!r}")
        if param.type is click.STRING and not isinstance(v, str):
            raise RequestError(f"{place}: expected text\n    got: the number {v!r}\n    fix: put it in quotes")
        try:
            param.type.convert(str(v), param, ctx)
        except click.BadParameter as error:
            raise RequestError(f"{place}: {error.message}") from None
        texts.append(str(v))
    return texts if several else texts[0]


def parse_origins(values: Sequence[str]) -> tuple[str, ...]:
    """Return the origins in the values of `--allowed-origins`, each an origin, `*`, or a JSON list of them.

    Raises:
        RequestError: If a value is not an origin.
    """
    from urllib.parse import urlsplit

    from axlearn_core.errors import RequestError

    origins: list[str] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            parsed = [value]
        origins += [str(origin).rstrip("/") for origin in parsed]
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and not (parts.scheme and parts.netloc and f"{parts.scheme}://{parts.netloc}" == origin):
            raise RequestError(
                f"--allowed-origins {origin!r} is not an origin\n"
                "    expected: SCHEME://HOST[:PORT], such as https://chat.example, or *"
            )
    return tuple(dict.fromkeys(origins))


def parse_root_path(path: str) -> str:
    """Return the prefix of `--root-path` without a slash at its end.

    Raises:
        RequestError: If it does not begin with a slash.
    """
    from axlearn_core.errors import RequestError

    if path and not path.startswith("/"):
        raise RequestError(f"--root-path {path!r} does not begin with a slash\n    fix: --root-path /{path}")
    return path.rstrip("/")
