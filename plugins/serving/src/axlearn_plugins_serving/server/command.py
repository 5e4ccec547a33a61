"""`axlearn serve`."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from axlearn_core.cli.terminal import echo

_SWITCH_SECONDS = 5e-4  # at Python's default of 5 ms, the engine's thread would wait for the event loop after each step


@click.command()
@click.argument("uri", metavar="RUN_DIR|HF_DIR|ORG/NAME")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8000,
    show_default=True,
    help="Port to listen on; 0 picks a free port.",
)
@click.option("--served-model-name", metavar="NAME", help="Name of the model (default: directory name).")
@click.option("--chat-template", metavar="FILE|plain", help="Chat template (default: the model's own).")
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable with the API key that clients must send.")
@click.option("--set", "set_", multiple=True, metavar="serving.PATH=VALUE", help="Set a value of the engine's config.")
@click.option(
    "--adapter", "adapters", multiple=True, metavar="NAME=DIR", help="Serve exported adapters as the model NAME."
)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Checkpoint to serve (default: newest).")
@click.option("--programs", metavar="DIR", help="Load programs (code) that `axlearn plan serve --export` wrote.")
@click.option("--replicas", type=click.IntRange(min=1), metavar="N", help="Number of replicas, run by Ray Serve.")
@click.option("--prefill", type=click.IntRange(min=1), metavar="N", help="Number of prefill processes.")
@click.option("--decode", type=click.IntRange(min=1), metavar="N", help="Number of decode processes.")
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    metavar="N",
    help="Limit on waiting requests; sets serving.max_waiting.",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1024),
    metavar="BYTES",
    default=4 * 2**20,
    show_default=True,
    help="Maximum size of a request body.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=30.0,
    show_default=True,
    help="Seconds to finish running requests after SIGTERM.",
)
@click.option("--allow-sleep", is_flag=True, help="Let clients free the memory of the devices with POST /sleep.")
@click.option(
    "--allow-adapters", is_flag=True, help="Let clients load adapters from any directory that the server can read."
)
@click.option("--log-requests", is_flag=True, help="Log each request to standard error.")
@click.option(
    "--engine",
    type=click.Choice(["axlearn", "vllm"]),
    default="axlearn",
    show_default=True,
    help="Engine. `vllm` runs an installed vLLM: a run is exported for it first, and arguments after -- go to `vllm serve`.",
)
@click.argument("more", nargs=-1, metavar="[-- VLLM_ARGUMENTS]")
@click.pass_context
def serve(
    context: click.Context,
    uri: str,
    host: str,
    port: int,
    served_model_name: str | None,
    chat_template: str | None,
    api_key_env: str | None,
    set_: tuple[str, ...],
    adapters: tuple[str, ...],
    step: int | None,
    programs: str | None,
    replicas: int | None,
    prefill: int | None,
    decode: int | None,
    max_queue: int | None,
    max_body: int,
    grace: float,
    allow_sleep: bool,
    allow_adapters: bool,
    log_requests: bool,
    engine: str,
    more: tuple[str, ...],
) -> None:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Serves a run, a directory in Hugging Face format, exported adapters, or anything that an installed plugin can open. Prints
    the address to standard output when the server is ready.
    """
    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.server.limits import ServerLimits, allowed_hosts, is_loopback
    from axlearn_plugins_serving.server.server_runner import bind
    from axlearn_plugins_serving.server.startup import Startup

    key = _key(api_key_env)
    if key is None and not is_loopback(host):
        echo(f"warning: anyone who can reach {host} can use this server; --api-key-env requires a key", err=True)
    if engine == "vllm":
        from axlearn_plugins_serving.server.external import serve_with_vllm

        _check_vllm_options(context)
        sys.exit(serve_with_vllm(uri, host=host, port=port, name=served_model_name, key=key, step=step, more=more))
    if replicas is not None:
        _check_replica_options(context)
    if more:
        raise RequestError(f"unexpected arguments: {' '.join(more)}\n    fix: remove them, or set --engine vllm")
    limits = ServerLimits(body_bytes=max_body, api_key=key, hosts=allowed_hosts(host, key))
    listener = bind(host, port)
    try:
        workers = None if prefill is None and decode is None else (prefill or 1, decode or 1)
        config = _config(set_, max_queue, adapters)
        if replicas is None and workers is None:
            from axlearn_plugins_serving.engine_devices import set_up_devices

            set_up_devices(config, owns_cores=True)
        if replicas is not None:
            engine_options = uri, served_model_name, chat_template, config, step, programs, workers
            listener.close()  # free the port for Ray Serve
            sys.exit(_run_replicas(engine_options, limits, replicas, host, port))
        with Startup() as startup:
            with _disable_gc():
                service = _open(uri, served_model_name, chat_template, config, step, programs, workers, startup)
            service.allows_sleep, service.allows_adapters = allow_sleep, allow_adapters
            code = _run(service, limits, listener, host, grace, log_requests, startup)
    except (RequestError, KeyboardInterrupt, SystemExit):
        listener.close()
        raise
    sys.exit(code)


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


def _key(variable: str | None) -> str | None:
    from axlearn_core.errors import RequestError

    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise RequestError(f"the environment variable {variable} is not set\n    fix: set it to the API key")
    return key


_VLLM_OPTIONS = ("uri", "host", "port", "served_model_name", "api_key_env", "step", "engine", "more")


def _check_vllm_options(context: click.Context) -> None:
    """Raise an error for options that only the axlearn engine supports.

    Raises:
        RequestError: If such an option is set.
    """
    from axlearn_core.errors import RequestError

    if options := _options_set(context, lambda name: name not in _VLLM_OPTIONS):
        raise RequestError(
            f"--engine vllm does not support {', '.join(options)}\n    fix: remove it, and pass `vllm serve` options after --"
        )


def _check_replica_options(context: click.Context) -> None:
    """Raise an error for options that Ray Serve would ignore.

    Ray Serve drains and logs requests itself.

    Raises:
        RequestError: If such an option is set.
    """
    from axlearn_core.errors import RequestError

    if options := _options_set(context, lambda name: name in ("grace", "log_requests")):
        raise RequestError(
            f"--replicas does not support {', '.join(options)}: Ray Serve drains and logs requests itself\n"
            "    fix: remove it; Ray writes a line for each request to its own logs"
        )


def _options_set(context: click.Context, chosen: Callable[[str], bool]) -> list[str]:
    """Return the chosen options that the user set, as spelled on the command line."""
    default = click.core.ParameterSource.DEFAULT
    names = [(p.name, p.opts[0]) for p in context.command.params if p.name]
    return [option for name, option in names if chosen(name) and context.get_parameter_source(name) != default]


def _config(set_: tuple[str, ...], max_queue: int | None, adapters: tuple[str, ...]) -> Any:
    """Build the engine's config from the command line."""
    from axlearn_core.plugins.request import parse_setting
    from axlearn_plugins_serving.settings import add_adapters, engine_config

    return add_adapters(engine_config([parse_setting(text) for text in set_], max_queue), adapters)


def _open(
    uri: str,
    name: str | None,
    template: str | None,
    config: Any,
    step: int | None,
    programs: str | None,
    workers: tuple[int, int] | None,
    startup: Any = None,
) -> Any:
    import attrs

    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.compile_count import CompileCount
    from axlearn_plugins_serving.open_engine import ignore_phase, model_name
    from axlearn_plugins_serving.server.engine_thread import EngineThread
    from axlearn_plugins_serving.server.service import Service
    from axlearn_plugins_transformer.text.chat_template import ChatTemplate

    count, report = CompileCount(), ignore_phase
    if startup is not None:
        report, startup.detail = startup.report, lambda: f", {count.total} programs so far"
    _check_names(name or model_name(uri), config)
    if workers is None:
        opened = _open_engine(uri, config, step, programs, report)
    else:
        from axlearn_plugins_serving.disaggregated.open_router import open_router

        prefill, decode = workers
        opened = open_router(
            uri, config=config, step=step, programs=programs, prefill=prefill, decode=decode, report=report
        )
    if opened.text is None:
        opened.engine.close()
        raise RequestError(
            f"{uri} has no tokenizer, so the server cannot read or write text\n    fix: serve a model with a tokenizer"
        )
    text = opened.text
    if template is not None:
        chat = ChatTemplate.Config(plain=True) if template == "plain" else ChatTemplate.Config(path=template)
        text = attrs.evolve(text.config, template=chat).build(tokenizer=text.tokenizer)
    engine = opened.engine
    return Service(
        EngineThread(engine),
        text,
        name or opened.name,
        adapters=engine.adapters,
        start_compilations=count.compiled,
    )


def _check_names(name: str, config: Any) -> None:
    """Raise `RequestError` if an adapter has the same name as the served model.

    Clients could request only one of them.
    """
    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.runner import ModelRunner

    if isinstance(config.runner, ModelRunner.Config) and name in config.runner.adapters:
        raise RequestError(
            f"--adapter {name} has the same name as the served model\n"
            "    fix: rename the adapter, or the model with --served-model-name"
        )


def _open_engine(uri: str, config: Any, step: int | None, programs: str | None, report: Callable[[str], None]) -> Any:
    from pathlib import Path

    from axlearn_plugins_serving.engine_devices import set_up_devices
    from axlearn_plugins_serving.open_engine import open_engine, open_with_programs
    from axlearn_plugins_serving.programs import find_run_programs

    folder = find_run_programs(uri) if programs is None else Path(programs)
    set_up_devices(config, owns_cores=folder is not None)
    open_ = open_with_programs if programs is None else open_engine
    return open_(uri, config=config, step=step, programs=folder, report=report)


def _run_replicas(engine_options: tuple[Any, ...], limits: Any, replicas: int, host: str, port: int) -> int:
    import functools

    from axlearn_core.errors import RequestError
    from axlearn_plugins_serving.open_engine import model_name
    from axlearn_plugins_serving.server.replicas import serve_replicas

    uri, name, template, *rest, programs, workers = engine_options
    if workers is not None:
        raise RequestError("--replicas cannot be combined with --prefill or --decode\n    fix: remove one of them")
    if port == 0:
        raise RequestError("--replicas needs a fixed port\n    got: --port 0\n    fix: name a free port")
    # Replicas run in different directories.
    uri, programs = (os.path.abspath(p) if p and os.path.exists(p) else p for p in (uri, programs))
    name = name or model_name(uri)
    open_service = functools.partial(_open, uri, name, template, *rest, programs, workers)
    return serve_replicas(
        open_service, limits, replicas=replicas, host=host, port=port, ready=lambda url: echo(f"{name} at {url}")
    )


def _run(service: Any, limits: Any, listener: Any, host: str, grace: float, log_requests: bool, startup: Any) -> int:
    import asyncio

    from axlearn_plugins_serving.server.server_runner import ServerRunner

    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()  # the server's objects live until it exits

    async def run() -> int:
        runner = ServerRunner(service, limits, grace=grace, log_requests=log_requests)
        host_text = f"[{host}]" if ":" in host else host
        address = f"http://{host_text}:{listener.getsockname()[1]}"

        def ready() -> None:
            startup.finish()
            echo(f"{service.name} at {address}")

        return await runner.run(listener, ready)

    return asyncio.run(run())
