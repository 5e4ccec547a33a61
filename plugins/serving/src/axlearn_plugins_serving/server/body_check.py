"""Validate large bodies in a separate process.

Parsing and validating JSON holds the GIL. This takes a few milliseconds for a single text of several megabytes, but half a
second for as many bytes of numbers or brackets. Such a body is validated in a separate process first, so that the server only
parses valid bodies.

`python -m axlearn_plugins_serving.server.body_check` runs that process. It reads lines of JSON, each followed by the bytes of a
body, and answers each with a line: {} if the body is valid, else the fields of the error.
"""

import json
import pkgutil
import resource
import selectors
import subprocess
import sys
import threading
import weakref
from typing import Any, TypeVar

from pydantic import BaseModel

from axlearn_plugins_serving.server.api_errors import ApiError, parse_body
from axlearn_plugins_serving.server.memory_return import return_memory

T = TypeVar("T", bound=BaseModel)

MANY = 50_000
"""Number of values above which a body is validated in the other process first."""
_SECONDS = 30.0
_MEMORY = 4 << 30


def count_values(body: bytes) -> int:
    """Return an upper bound on the number of values in a body.

    Commas and brackets in strings count too.
    """
    return body.count(b",") + body.count(b"[") + body.count(b"{")


class BodyCheck:
    """A parser for request bodies.

    A separate process, started on demand, validates expensive bodies. Methods are thread-safe.

    Args:
        context: Maximum number of tokens in a prompt.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def parse(self, model: type[T], body: bytes) -> T:
        """Parse and validate a body; see `parse_body`.

        Raises:
            ApiError: 400 if the body is invalid, or takes too long or too much memory to read.
        """
        if count_values(body) >= MANY:
            with self._lock:
                answer = self._ask(f"{model.__module__}:{model.__qualname__}", body)
            if answer:
                raise ApiError(**answer)
        return parse_body(model, body, context=self._context)

    def close(self) -> None:
        """Stop the process."""
        with self._lock:
            self._end()

    def _ask(self, model: str, body: bytes) -> dict[str, Any]:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            head = json.dumps({"model": model, "context": self._context, "bytes": len(body)}).encode()
            process.stdin.write(head + b"\n" + body)
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:  # `select.select` supports only descriptors below 1,024
                selector.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if selector.select(_SECONDS) else b""
        except BrokenPipeError:
            line = b""
        if not line:
            self._end()
            raise ApiError(
                400, "the body takes too long or too much memory to read; send fewer values", code="costly_body"
            )
        return json.loads(line)

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _stop, self._process)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            _stop(self._process)
        self._process = None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        head = json.loads(line)
        body = sys.stdin.buffer.read(head["bytes"])
        answer: dict[str, Any] = {}
        try:
            parse_body(pkgutil.resolve_name(head["model"]), body, context=head["context"])
        except ApiError as error:
            answer = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        del body
        return_memory()


if __name__ == "__main__":
    main()
