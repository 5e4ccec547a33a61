"""`axlearn serve --replicas N`: replicas of the server behind Ray Serve."""

import asyncio
import importlib
import signal
import threading
from collections.abc import Callable
from typing import Any

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_serving.server.request_record import REQUEST_ID

NAME = "axlearn"


class ReplicaApp:
    """The ASGI application of a replica. It opens its model when the replica starts.

    Args:
        open_service: Opens the model.
        limits: Limits on requests.
    """

    def __init__(self, open_service: Callable[[], Any], limits: Any):
        self._open, self._limits = open_service, limits
        self._app: Any = None
        self._service: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. Handle lifespan events by opening and closing the model."""
        if scope["type"] != "lifespan":

            async def send_once(message: Any) -> None:
                if message["type"] == "http.response.start":  # Ray Serve adds the same id
                    headers = [each for each in message["headers"] if each[0].lower() != REQUEST_ID.encode()]
                    message = {**message, "headers": headers}
                await send(message)

            await self._app(scope, receive, send_once)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._start()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._service.thread.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _start(self) -> None:
        from axlearn_plugins_serving.server.app import create_app

        self._service = await asyncio.to_thread(self._open)
        self._service.is_replica = True
        self._service.thread.start()
        self._app = create_app(self._service, self._limits)


def serve_replicas(
    open_service: Callable[[], Any], limits: Any, *, replicas: int, host: str, port: int, ready: Callable[[str], None]
) -> int:
    """Serve with replicas until SIGTERM or Ctrl-C, and return the exit code.

    Joins the Ray cluster at `RAY_ADDRESS` if it is set; otherwise starts Ray on this machine.

    Args:
        open_service: Opens the model in the process of each replica. It is pickled.
        limits: Limits on requests.
        replicas: Number of replicas.
        host: Address that Ray Serve listens on.
        port: Port that Ray Serve listens on.
        ready: Called with the server's address when the server accepts requests.

    Raises:
        RequestError: If Ray Serve is not installed.
        WorkError: If a replica cannot start.
    """
    try:
        ray: Any = importlib.import_module("ray")
        serve: Any = importlib.import_module("ray.serve")
    except ImportError as error:
        raise RequestError(
            "replicas need Ray Serve, which is not installed\n    fix: pip install 'axlearn-plugins-serving[ray]'"
        ) from error
    stopped = threading.Event()
    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
    try:
        serve.start(http_options={"host": host, "port": port})

        def build() -> ReplicaApp:
            return ReplicaApp(open_service, limits)

        @serve.deployment(name="model", num_replicas=replicas, max_ongoing_requests=10_000)
        @serve.ingress(build)
        class Model:
            """A replica."""

        model: Any = Model
        try:
            serve.run(model.bind(), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise WorkError(f"the replicas cannot start: {error}") from error
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which installs its own handlers
            signal.signal(number, lambda *_: stopped.set())
        ready(f"http://{host}:{port}")
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0
