"""`RequestRecord`: an HTTP request and its response, for logs and traces."""

import contextvars
import os
import re
import time
from typing import Any
from urllib.parse import quote

import attrs
from starlette.datastructures import Headers
from starlette.types import Scope

from axlearn_plugins_serving.server.prompt_job import Job

REQUEST_ID = "x-request-id"
"""Header with the id of a request. Clients may choose it."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_request_id() -> str:
    """Return an id for a request that has none."""
    return f"req-{os.urandom(12).hex()}"


@attrs.define(eq=False)
class RequestRecord:
    """An HTTP request and its response so far.

    Attributes:
        id: The client's `X-Request-Id` if it has up to 128 letters, digits or `._:-`; otherwise a new id.
        client: Address of the client as HOST:PORT; None if it is connected to a Unix socket.
        method: HTTP method.
        target: Path and query, percent-encoded.
        version: HTTP version.
        headers: Headers of the request.
        path: Path without the query.
        began: Time of arrival, from `time.time`.
        seconds: Time until the response ended; None while it is running.
        status: Status of the response; None until it starts.
        job: The engine requests behind it; None if it does not generate text.
    """

    id: str
    client: str | None
    method: str
    target: str
    version: str
    headers: Headers = attrs.field(repr=False)
    path: str
    began: float = attrs.field(factory=time.time)
    seconds: float | None = None
    status: int | None = None
    job: Job | None = None

    @classmethod
    def from_scope(cls, scope: Scope) -> "RequestRecord":
        """Start the record of a request."""
        headers, client = Headers(scope=scope), scope.get("client")
        sent, query = headers.get(REQUEST_ID, ""), scope.get("query_string") or b""
        return cls(
            id=sent if _ID.fullmatch(sent) else new_request_id(),
            client=None if not client else f"{client[0]}:{client[1]}",
            method=scope["method"],
            target=quote(scope["path"]) + (f"?{query.decode('ascii', 'replace')}" if query else ""),
            version=scope.get("http_version", "1.1"),
            headers=headers,
            path=scope["path"],
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a log line. Fields without a value are left out."""
        fields: dict[str, Any] = {
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.target,
            "status": self.status,
            "duration": None if self.seconds is None else round(self.seconds, 6),
        }
        if self.job is not None:
            usage, ttft = self.job.usage, self.job.timing.first_token_seconds
            fields |= {
                "model": self.job.model,
                "prompt_tokens": usage.prompt,
                "output_tokens": usage.completion,
                "ttft": None if ttft is None else round(ttft, 6),
                "finish": ",".join(dict.fromkeys(self.job.finish_reasons)),
            }
        return {name: value for name, value in fields.items() if value is not None}


current_request: contextvars.ContextVar[RequestRecord | None] = contextvars.ContextVar("current_request", default=None)
"""The request that the current task answers."""
