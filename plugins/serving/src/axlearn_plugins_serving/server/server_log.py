"""The server's log: lines on standard error, as text or as JSON."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal

from axlearn_plugins_serving.server.request_record import RequestRecord, current_request

LogFormat = Literal["text", "json"]

log = logging.getLogger("axlearn.serving")
_requests = logging.getLogger("axlearn.serving.requests")
_LOGGERS = ("axlearn", "uvicorn", "asyncio")


@contextlib.contextmanager
def write_logs(level: str = "info", format: LogFormat = "text", *, requests: bool = False) -> Iterator[None]:
    """Write the logs of the server, of uvicorn and of asyncio to standard error in this context.

    With the format `json`, lines that Python code prints to standard error are logged, too.

    Args:
        level: Lowest level to write, one of `serve_options.LEVELS`.
        format: `text` for people, or `json` for one JSON object per line.
        requests: Whether to write a line for each request, at the level `info`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    number = logging.getLevelNamesMapping()[level.upper()]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(number if logger.name == "axlearn" else max(logging.WARNING, number))
    _requests.setLevel(logging.NOTSET if requests else logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(_LogStream()) if format == "json" else contextlib.nullcontext():
            yield
    finally:
        for logger, (handlers, propagate, old) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)
        _requests.setLevel(logging.NOTSET)


def log_arrival(record: RequestRecord) -> None:
    """Log that a request has arrived, at the level `debug`."""
    log.debug("%s %s begins", record.method, record.target, extra={"request": record})


def log_request(record: RequestRecord) -> None:
    """Log a request whose response has ended."""
    _requests.info(
        '%s - "%s %s HTTP/%s" %s id=%s',
        record.client or "unix",
        record.method,
        record.target,
        record.version,
        record.status or "-",
        record.id,
        extra={"request": record},
    )


class _TextFormatter(logging.Formatter):
    """Adds the time to lines about requests."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{self.formatTime(record)} {text}" if record.__dict__.get("request") else text


class _JsonFormatter(logging.Formatter):
    """Writes a JSON object with the time, the level, the fields of the request, and the message of other lines."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {"time": time, "level": record.levelname.lower()}
        request = record.__dict__.get("request")
        if request is not None:
            fields |= request.as_json()
        else:
            fields["message"] = record.getMessage()
            if (current := current_request.get()) is not None:
                fields["id"] = current.id
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _LogStream(io.TextIOBase):
    """A text stream that logs each line."""

    def __init__(self) -> None:
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                level = logging.WARNING if line.startswith("warning:") else logging.INFO
                log.log(level, "%s", line)
        return len(text)
