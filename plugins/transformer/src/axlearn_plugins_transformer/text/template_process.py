"""A process that renders a chat template, with limits on time and memory."""

import contextlib
import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

SECONDS = 5.0
START_SECONDS = 20.0  # Jinja folds constants at compile time
MEMORY = 1 << 29
ANSWER_BYTES = 64 << 20


class TemplateFailed(Exception):
    """A template cannot be rendered.

    Attributes:
        line: Line of a syntax error in the template, or None.
    """

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


class TemplateProcess:
    """Renders one untrusted template.

    If it loops forever or exceeds the memory limit, its process is killed and restarted.

    It is thread-safe, because threads take turns.

    Args:
        source: The template.
    """

    def __init__(self, source: str):
        self._first = {"source": source}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fresh = True
        self._finalize: Any = None

    def render(self, variables: dict[str, Any], *, today: str | None = None) -> str:
        """Render a conversation.

        Args:
            variables: Variables of the template.
            today: Date for the template, YYYY-MM-DD. None uses the current time.

        Raises:
            TemplateFailed: The template has a syntax error, fails, or takes too long.
        """
        with self._lock:
            try:
                request = json.dumps({"variables": variables, "today": today}).encode() + b"\n"
            except (TypeError, ValueError, RecursionError) as error:
                raise TemplateFailed(f"the conversation is not JSON: {error}") from None
            process = self._start()
            try:
                if self._fresh:
                    self._exchange(process, json.dumps(self._first).encode() + b"\n", START_SECONDS)
                    self._fresh = False
                answer = self._exchange(process, request, SECONDS)
            except BaseException:
                self._end()
                raise
        if "syntax" in answer:
            raise TemplateFailed(answer["syntax"], answer["line"])
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-P", str(Path(__file__).with_name("template_server.py")), str(MEMORY)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._finalize = weakref.finalize(self, _close, self._process)
        self._fresh = True
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + seconds
        # The server reads a whole request before it answers, so writing cannot deadlock with reading.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TemplateFailed(f"rendering took longer than {seconds:g} s")
                chunk = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not chunk:
                    raise TemplateFailed(f"its process ended; the memory limit is {MEMORY:,} bytes")
                answer += chunk
                if len(answer) > ANSWER_BYTES:
                    raise TemplateFailed(f"its output exceeds {ANSWER_BYTES:,} bytes")
        return json.loads(answer)

    def _end(self) -> None:
        if self._finalize is not None:
            self._finalize()
        self._process = None


def _close(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait()
