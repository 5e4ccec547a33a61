"""Run the commands and code of pages in one process with one device, which imports JAX once.

Requests and answers are lines of JSON: {cwd, kind, text} -> {code, out, err}.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
import types
from pathlib import Path


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


def main() -> None:
    """Serves until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        os.chdir(request["cwd"])
        try:
            run = bash(request["text"]) if request["kind"] == "bash" else python(request["text"], request["cwd"])
        except BaseException:  # whatever a page's code raises is its test's failure
            run = (1, "", traceback.format_exc())
        print(json.dumps(dict(zip(("code", "out", "err"), run, strict=True))), file=answers, flush=True)


if __name__ == "__main__":
    main()
