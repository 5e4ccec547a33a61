"""URLs at which another process can call the policy for one attempt."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import uvicorn

from axlearn_plugins_rl.agents.attempt import AgentCall, Attempt, current_call

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


@contextlib.asynccontextmanager
async def open_url(app: "ASGIApp", attempt: Attempt, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Yield the base URL of an OpenAI-compatible server whose calls belong to an attempt.

    The server listens in this event loop on a free port. Its path contains a secret.

    Args:
        app: The application of the policy.
        attempt: The attempt.
        host: Address to listen on.
    """
    prefix = f"/{secrets.token_urlsafe(16)}"

    async def answer(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http" or not scope["path"].startswith(f"{prefix}/"):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        path = scope["path"].removeprefix(prefix)
        before = current_call.set(AgentCall(attempt=attempt))
        try:
            await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        finally:
            current_call.reset(before)

    with socket.create_server((host, 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(answer, log_level="error", lifespan="off", ws="none"))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://{host}:{listener.getsockname()[1]}{prefix}/v1"
        finally:
            server.should_exit = True
            await serving
