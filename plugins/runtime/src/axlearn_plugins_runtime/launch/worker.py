"""A warm trainer process, which imports everything before it is assigned a rank.

    python -m axlearn_plugins_runtime.launch.worker DESCRIPTOR WORDS...

The host's agent holds the other end of the socket DESCRIPTOR. Messages are JSON objects, one per line:

- `{"ready": true}`, to the agent after all imports.
- `{"import": FILE}`, from the agent: import the modules listed in FILE. May be repeated.
- `{"words": [...], "environment": {...}, "log": PATH}`, from the agent: start training.
- `{"list_modules": FILE}`, from the agent while training: write the names of the imported modules to FILE.
- `{"exit": CODE, "kind": ..., "message": ...}`, to the agent at the end.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from axlearn_core.compat import assign_environment
from axlearn_plugins_runtime.launch.exits import Exit, classify_error

MODULES = (
    "axlearn_core.cli.main",
    "axlearn_core.cli.train",
    "axlearn_core.train.api",
    "axlearn_core.checkpoint.sharded",
    "jax.experimental.multihost_utils",
)
"""Modules that every run imports."""


def main() -> None:
    """Warm up, wait for the assignment, train, and report the exit."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _die_with_agent()
    reader = channel.makefile("r", encoding="utf-8")
    # Ignore Ctrl-C while waiting. It would otherwise end a warm process if it is pressed in the agent's terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up(sys.argv[2:])
    _send(channel, {"ready": True})
    while "words" not in (assignment := json.loads(reader.readline() or '{"words": null}')):
        import_modules(assignment["import"])
    if assignment["words"] is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_handle_requests, args=(reader,), name="agent", daemon=True).start()
    assign_environment(assignment["environment"])
    log = os.open(assignment["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result = run(assignment["words"])
    _send(channel, result.to_message())
    sys.stdout.flush()
    sys.stderr.flush()
    if result.code:
        os._exit(result.code)  # a normal exit would wait for peers in JAX
    sys.exit(0)


def warm_up(words: list[str]) -> None:
    """Import the modules that the run needs and resolve its config. Does not start a JAX backend."""
    for module in MODULES:
        importlib.import_module(module)
    with contextlib.suppress(Exception, SystemExit):  # the run itself reports errors in the request
        from axlearn_core.cli.train import train
        from axlearn_core.plugins.request import Request
        from axlearn_core.plugins.resolve import resolve

        with train.make_context("train", list(words[1:])) as context:
            params = context.params
        resolve(
            Request.from_arguments(
                params["experiment"],
                with_=params["with_"],
                without=params["without"],
                set=params["set_"],
                steps=params["steps"],
                target=params["target"],
            )
        )


def run(words: list[str]) -> Exit:
    """Run `axlearn WORDS` in this process. Return its exit."""
    import click

    from axlearn_core.cli.main import cli

    sys.argv = ["axlearn", *words]
    try:
        with cli.make_context("axlearn", list(words)) as context:
            cli.invoke(context)
    except click.exceptions.Exit as exit_:
        return (
            Exit(code=exit_.exit_code) if exit_.__cause__ is None else _failure_exit(exit_.__cause__, exit_.exit_code)
        )
    except SystemExit as exit_:
        return Exit(code=exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None))
    except click.ClickException as error:
        error.show()
        return Exit(code=error.exit_code, kind="request", message=error.format_message())
    except BaseException as error:
        traceback.print_exc()
        return _failure_exit(error, 1)
    return Exit(code=0)


def _failure_exit(error: BaseException, code: int) -> Exit:
    return Exit(code=code, kind=classify_error(error), message=f"{type(error).__name__}: {error}"[:2000])


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def import_modules(file: str) -> None:
    """Import the modules listed in a file, so that a later restart does not wait for imports."""
    with contextlib.suppress(OSError, ValueError):
        for name in json.loads(Path(file).read_text()):
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # ignore modules that only some processes can import
                    importlib.import_module(name)


def _handle_requests(reader: Any) -> None:
    for line in reader:
        with contextlib.suppress(OSError, KeyError):
            file = Path(json.loads(line)["list_modules"])
            names = [name for name in list(sys.modules) if not name.startswith("__")]
            temporary = file.with_name(f".{file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(names))
            temporary.replace(file)
    os.kill(os.getpid(), signal.SIGKILL)  # the agent is gone, so nothing would restart or end this process


def _die_with_agent() -> None:
    """Ask Linux to kill this process when the agent's thread that started it dies, even if this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
