"""`axlearn serve`."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from axlearn_core.cli.terminal import echo
from axlearn_plugins_serving.server.serve_options import (
    SETTINGS,
    ServeCommand,
    parse_origins,
    parse_root_path,
    serve_options,
)

_SWITCH_SECONDS = 5e-4  # at Python's default of 5 ms, the engine's thread would wait for the event loop after each step
Options = Mapping[str, Any]
"""The values of the command's options, by parameter name."""


@click.command(cls=ServeCommand)
@click.argument("uri", metavar="RUN_DIR|HF_DIR|ORG/NAME")
@serve_options
@click.argument("more", nargs=-1, metavar="[-- VLLM_ARGUMENTS]")
@click.pass_context
def serve(context: click.Context, uri: str, more: tuple[str, ...], **options: Any) -> None:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Serves a run, a directory in Hugging Face format, exported adapters, or anything that an installed plugin can open. Prints
    the address to standard output when the server is ready.
    """
    from axlearn_core.errors import AxlearnError, RequestError
    from axlearn_plugins_serving.server.server_log import log, write_logs

    keys = _keys(options["api_keys"], options["api_key_env"])
    _check_names(options["names"])
    if options["engine"] == "vllm":
        _check_vllm_options(context, keys)
        sys.exit(_serve_with_vllm(uri, options, keys, more))
    if options["replicas"] is not None:
        _check_replica_options(context)
    if more:
        raise RequestError(f"unexpected arguments: {' '.join(more)}\n    fix: remove them, or set --engine vllm")
    if options["uds"] is not None and (both := _options_set(context, lambda name: name in ("host", "port"))):
        raise RequestError(f"--uds cannot be combined with {', '.join(both)}\n    fix: remove one of them")
    with write_logs(options["log_level"], options["log_format"], requests=options["log_requests"]):
        try:
            sys.exit(_serve(uri, options, keys, context.meta.get(SETTINGS, ())))
        except AxlearnError as error:
            if options["log_format"] != "json":
                raise
            log.error("%s", error)
            sys.exit(error.exit_code)


def _serve(uri: str, options: Options, keys: tuple[str, ...], settings: Sequence[Any]) -> int:
    """Serve with the axlearn engine, and return the exit code.

    Args:
        uri: Model to serve.
        options: Options of the command.
        keys: API keys.
        settings: Settings of the engine from a config file.
    """
    from axlearn_plugins_serving.server.limits import ServerLimits, allowed_hosts, is_loopback
    from axlearn_plugins_serving.server.server_log import log
    from axlearn_plugins_serving.server.server_runner import bind, bind_unix
    from axlearn_plugins_serving.server.startup import Startup

    host, path = options["host"], options["uds"]
    if not keys and path is None and not is_loopback(host):
        log.warning("warning: anyone who can reach %s can use this server; --api-key-env requires a key", host)
    limits = ServerLimits(
        body_bytes=options["max_body"],
        api_keys=keys,
        hosts=None if path is not None else allowed_hosts(host, has_key=bool(keys)),
        origins=parse_origins(options["origins"]),
        root_path=parse_root_path(options["root_path"]),
    )
    tracer = _open_tracer(options["otlp_traces_endpoint"])
    listener = bind(host, options["port"]) if path is None else bind_unix(path)
    try:
        config = _config(options, settings)
        if options["replicas"] is not None:
            listener.close()  # free the port for Ray Serve
            return _run_replicas(uri, options, config, limits)
        if _workers(options) is None:
            from axlearn_plugins_serving.engine_devices import set_up_devices

            set_up_devices(config, owns_cores=True)
        with Startup(write=log.info) as startup:
            with _disable_gc():
                service = _open(uri, options, config, startup)
            return _run(service, limits, listener, options, tracer, startup)
    finally:
        listener.close()
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


@contextlib.contextmanager
def _disable_gc() -> Iterator[None]:
    """Disable garbage collection while a model is opened.

    There is little garbage, and looking for it takes 0.1 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _keys(keys: tuple[str, ...], variable: str | None) -> tuple[str, ...]:
    """Return the API keys from the command line and from an environment variable."""
    from axlearn_core.errors import RequestError

    if any(not key.strip() or not key.isascii() for key in keys):
        raise RequestError("--api-key is empty or not ASCII\n    fix: set it to a key of ASCII characters")
    if variable is None:
        return keys
    key = os.environ.get(variable, "").strip()
    if not key:
        raise RequestError(f"the environment variable {variable} is not set\n    fix: set it to the API key")
    return (*keys, key)


def _check_names(names: tuple[str, ...]) -> None:
    from axlearn_core.errors import RequestError

    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise RequestError(f"--served-model-name {name!r} is empty or given twice\n    fix: remove it")


def _workers(options: Options) -> tuple[int, int] | None:
    """Return the number of prefill and decode processes, or None for one engine in this process."""
    prefill, decode = options["prefill"], options["decode"]
    return None if prefill is None and decode is None else (prefill or 1, decode or 1)


def _open_tracer(endpoint: str | None) -> Any:
    if endpoint is None:
        return None
    from axlearn_plugins_serving.server.tracing import Tracer

    return Tracer(endpoint)


_VLLM_OPTIONS = ("uri", "host", "port", "names", "api_keys", "api_key_env", "max_model_len", "step", "engine", "more")


def _serve_with_vllm(uri: str, options: Options, keys: tuple[str, ...], more: tuple[str, ...]) -> int:
    from axlearn_plugins_serving.server.external import serve_with_vllm

    if options["max_model_len"] is not None:
        more = ("--max-model-len", str(options["max_model_len"]), *more)
    return serve_with_vllm(
        uri,
        host=options["host"],
        port=options["port"],
        names=options["names"],
        key=keys[0] if keys else None,
        step=options["step"],
        more=more,
    )


def _check_vllm_options(context: click.Context, keys: tuple[str, ...]) -> None:
    """Raise an error for options that only the axlearn engine supports.

    Raises:
        RequestError: If such an option is set.
    """
    from axlearn_core.errors import RequestError

    if options := _options_set(context, lambda name: name not in _VLLM_OPTIONS):
        raise RequestError(
            f"--engine vllm does not support {', '.join(options)}\n    fix: remove it, and pass `vllm serve` options after --"
        )
    if len(keys) > 1:
        raise RequestError("--engine vllm supports one API key\n    fix: pass --api-key with all keys after --")


def _check_replica_options(context: click.Context) -> None:
    """Raise an error for options that replicas do not support.

    Ray Serve listens, drains and logs requests itself. Replicas cannot share a store of responses.

    Raises:
        RequestError: If such an option is set.
    """
    from axlearn_core.errors import RequestError

    ignored = ("grace", "log_requests", "uds", "otlp_traces_endpoint")
    if options := _options_set(context, lambda name: name in ignored):
        raise RequestError(
            f"--replicas does not support {', '.join(options)}: Ray Serve listens, drains and logs requests itself\n"
            "    fix: remove it; Ray writes a line for each request to its own logs"
        )
    if _options_set(context, lambda name: name == "response_store"):
        raise RequestError(
            "--replicas does not support --response-store: each replica would have its own store\n"
            "    fix: remove it, and let clients send the whole conversation"
        )


def _options_set(context: click.Context, chosen: Callable[[str], bool]) -> list[str]:
    """Return the chosen options that the user set, as spelled on the command line."""
    default = click.core.ParameterSource.DEFAULT
    names = [(p.name, p.opts[0]) for p in context.command.params if p.name and p.expose_value]
    return [option for name, option in names if chosen(name) and context.get_parameter_source(name) != default]


def _config(options: Options, settings: Sequence[Any]) -> Any:
    """Build the engine's config from the command line and the settings of a config file."""
    from axlearn_core.plugins.request import parse_setting
    from axlearn_plugins_serving.settings import add_adapters, engine_config

    own = [parse_setting(text) for text in options["set_"]]
    inner = tuple(f"{setting.path}." for setting in own)  # the command line replaces all of a path
    settings = [setting for setting in settings if not setting.path.startswith(inner or ("\0",))]
    config = engine_config([*settings, *own], options["max_queue"], options["max_model_len"])
    return add_adapters(config, options["adapters"])


def _open(uri: str, options: Options, config: Any, startup: Any = None) -> Any:
    """Open the model, and return its `Service`. Called in each replica, too."""
    from axlearn_plugins_serving.compile_count import CompileCount
    from axlearn_plugins_serving.engine_capabilities import CompilesElsewhere
    from axlearn_plugins_serving.open_engine import ignore_phase, model_name
    from axlearn_plugins_serving.server.engine_thread import EngineThread
    from axlearn_plugins_serving.server.response_store import ResponseStore
    from axlearn_plugins_serving.server.service import Service

    count, report = CompileCount(), ignore_phase
    if startup is not None:
        report, startup.detail = startup.report, lambda: f", {count.total} programs so far"
    names = options["names"] or (model_name(uri),)
    _check_adapters(names, config)
    responses = ResponseStore(options["response_store"])
    opened = _open_engine(uri, options, config, report)
    engine, text = opened.engine, opened.text
    assert text is not None, "_prepare_text rejects models without a tokenizer"
    elsewhere = opened.engine.start_compilations if isinstance(opened.engine, CompilesElsewhere) else 0
    return Service(
        EngineThread(engine),
        text,
        names[0],
        adapters=engine.adapters,
        start_compilations=count.compiled + elsewhere,
        aliases=tuple(names[1:]),
        tool_parser=options["tool_parser"],
        reasoning_parser=options["reasoning_parser"],
        responses=responses,
        allows_sleep=options["allow_sleep"],
        allows_adapters=options["allow_adapters"],
    )


def _prepare_text(uri: str, options: Options, text: Any) -> Any:
    """Return the model's text processor with the template of `--chat-template`. Called before anything is compiled.

    Args:
        uri: The model.
        options: Options of the command.
        text: Text processor of the model, or None if it has no tokenizer.

    Raises:
        RequestError: If there is no tokenizer, or a parser is unknown or ambiguous.
        InputError: If the template cannot be read or is not valid.
    """
    import attrs

    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.server.answer_reader import choose_formats
    from axlearn_plugins_transformer.text.chat_template import ChatTemplate

    if text is None:
        raise RequestError(
            f"{uri} has no tokenizer, so the server cannot read or write text\n    fix: serve a model with a tokenizer"
        )
    template = options["chat_template"]
    if template is not None:
        chat = ChatTemplate.Config(plain=True) if template == "plain" else ChatTemplate.Config(path=template)
        text = attrs.evolve(text.config, template=chat).build(tokenizer=text.tokenizer)
        text.template.check_syntax()
    choose_formats(text, options["tool_parser"], options["reasoning_parser"])
    return text


def _check_adapters(names: Sequence[str], config: Any) -> None:
    """Raise `RequestError` if an adapter has the same name as the served model.

    Clients could request only one of them.
    """
    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.runner import ModelRunner

    for name in names:
        if isinstance(config.runner, ModelRunner.Config) and name in config.runner.adapters:
            raise RequestError(
                f"--adapter {name} has the same name as the served model\n"
                "    fix: rename the adapter, or the model with --served-model-name"
            )


def _open_engine(uri: str, options: Options, config: Any, report: Callable[[str], None]) -> Any:
    import functools
    from pathlib import Path

    prepare_text = functools.partial(_prepare_text, uri, options)
    step, programs = options["step"], options["programs"]
    if (workers := _workers(options)) is not None:
        from axlearn_plugins_serving.disaggregated.open_router import open_router

        prefill, decode = workers
        return open_router(
            uri,
            config=config,
            step=step,
            programs=programs,
            prefill=prefill,
            decode=decode,
            prepare_text=prepare_text,
            report=report,
        )
    from axlearn_plugins_serving.engine_devices import set_up_devices
    from axlearn_plugins_serving.open_engine import open_engine, open_with_programs
    from axlearn_plugins_serving.programs import find_run_programs

    folder = find_run_programs(uri) if programs is None else Path(programs)
    set_up_devices(config, owns_cores=folder is not None)
    open_ = open_with_programs if programs is None else open_engine
    return open_(uri, config=config, step=step, programs=folder, prepare_text=prepare_text, report=report)


def _run_replicas(uri: str, options: Options, config: Any, limits: Any) -> int:
    import functools

    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.open_engine import model_name
    from axlearn_plugins_serving.server.replicas import serve_replicas

    if _workers(options) is not None:
        raise RequestError("--replicas cannot be combined with --prefill or --decode\n    fix: remove one of them")
    if options["port"] == 0:
        raise RequestError("--replicas needs a fixed port\n    got: --port 0\n    fix: name a free port")
    # Replicas run in different directories.
    programs = options["programs"]
    uri, programs = (os.path.abspath(p) if p and os.path.exists(p) else p for p in (uri, programs))
    names = options["names"] or (model_name(uri),)
    options = {**options, "programs": programs, "names": names}
    return serve_replicas(
        functools.partial(_open, uri, options, config),
        limits,
        replicas=options["replicas"],
        host=options["host"],
        port=options["port"],
        ready=lambda url: echo(f"{names[0]} at {url}"),
    )


def _run(service: Any, limits: Any, listener: Any, options: Options, tracer: Any, startup: Any) -> int:
    import asyncio

    from axlearn_plugins_serving.server.server_runner import ServerRunner

    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()  # the server's objects live until it exits
    host, path = options["host"], options["uds"]

    async def run() -> int:
        runner = ServerRunner(service, limits, grace=options["grace"], tracer=tracer)
        host_text = f"[{host}]" if ":" in host else host
        address = f"unix:{path}" if path is not None else f"http://{host_text}:{listener.getsockname()[1]}"

        def ready() -> None:
            startup.finish()
            echo(f"{service.name} at {address}{limits.root_path}")

        return await runner.run(listener, ready)

    return asyncio.run(run())
