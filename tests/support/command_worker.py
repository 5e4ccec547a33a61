"""Run the commands and code of pages in one process with one device, which imports JAX once.

Requests and answers are lines of JSON: {cwd, kind, text} -> {code, out, err}.

With `--fork`, JAX is imported once but starts anew for the Python blocks of each page and for each block of commands. Answers then
have a further value: `stderr`, what the block wrote to the descriptor, including the messages of libraries in C++.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def axlearn(words: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    """A command of the command line."""
    if env or "--target" in words:  # has to be known before anything starts
        command = [sys.executable, "-m", "axlearn_core", *words]
        process = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
        return process.returncode, process.stdout, process.stderr
    from click.testing import CliRunner

    from axlearn_core.cli.main import cli

    result = CliRunner().invoke(cli, words, prog_name="axlearn", catch_exceptions=True)
    trace = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        trace = "".join(traceback.format_exception(result.exception))
    return result.exit_code, result.stdout, result.stderr + trace


def bash(text: str) -> tuple[int, str, str]:
    """The commands of a block, up to the first that fails; `axlearn`, and Python files of the page's directory."""
    out, err = "", ""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        file = words.pop() if len(words) > 2 and words[-2] == ">" else None
        if file:
            words.pop()
        env = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        if words[0] == "axlearn":
            code, printed, messages = axlearn(words[1:], env)
        elif words[0] == "python" and words[1].endswith(".py"):
            code, printed, messages = script(words[1:])
        else:
            raise ValueError(f"a test cannot run {line!r}; mark the block with <!-- test: skip REASON -->")
        if file:
            Path(file).write_text(printed, "utf-8")
        out, err = out + ("" if file else printed), err + messages
        if code:
            return code, out, err
    return 0, out, err


def script(words: list[str]) -> tuple[int, str, str]:
    """A Python file."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = words
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv = before
    return 0, printed.getvalue(), ""


def python(text: str, cwd: str) -> tuple[int, str, str]:
    """A block of Python; the blocks of a page share one module."""
    name = "page_" + re.sub(r"\W", "_", cwd)
    module = sys.modules.setdefault(name, types.ModuleType(name))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, f"<{cwd}>", "exec"), vars(module))
    return 0, printed.getvalue(), ""


def answer(request: dict[str, str]) -> dict[str, Any]:
    """Run one block."""
    os.chdir(request["cwd"])
    try:
        run = bash(request["text"]) if request["kind"] == "bash" else python(request["text"], request["cwd"])
    except BaseException:  # whatever a page's code raises is its test's failure
        run = (1, "", traceback.format_exc())
    return dict(zip(("code", "out", "err"), run, strict=True))


class Fork:
    """A copy of this process that runs blocks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=self._serve, args=(other_end,))
        self.process.start()

    def answer(self, request: dict[str, str]) -> dict[str, Any]:
        """Run one block in the copy."""
        self.connection.send(request)
        return self.connection.recv()

    def close(self) -> None:
        """End the copy."""
        self.connection.send(None)
        self.process.join()

    @staticmethod
    def _serve(connection: Any) -> None:
        while (request := connection.recv()) is not None:
            with tempfile.TemporaryFile("w+") as file:
                os.dup2(file.fileno(), 2)
                reply = answer(request)
                sys.stderr.flush()
                file.seek(0)
                connection.send({**reply, "stderr": file.read()})


def serve_by_forks(requests: Iterator[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Answer requests, each with a JAX that no other page has started."""
    for module in ("axlearn_core.compose", "axlearn_core.train.api", "axlearn_core.cli.main"):
        importlib.import_module(module)
    page, cwd = None, ""
    for request in requests:
        if request["kind"] == "bash":
            fork = Fork()
            yield fork.answer(request)
            fork.close()
            continue
        if page is None or cwd != request["cwd"]:
            if page is not None:
                page.close()
            page, cwd = Fork(), request["cwd"]
        yield page.answer(request)
    if page is not None:
        page.close()


def main() -> None:
    """Serve until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    requests = (json.loads(line) for line in sys.stdin)
    for reply in serve_by_forks(requests) if "--fork" in sys.argv else map(answer, requests):
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
