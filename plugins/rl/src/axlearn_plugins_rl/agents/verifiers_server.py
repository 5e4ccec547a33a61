"""An HTTP server for an environment of the package `verifiers` (0.4 or later).

`verifiers` needs other versions of packages than axlearn, so this file runs in an environment of its own and does not import
axlearn:

    python verifiers_server.py TASKSET --port 8100

`GET /examples` lists the examples. `POST /rollouts` with `{"example": 3, "url": "http://.../v1", "model": "policy"}` runs one
episode against an OpenAI-compatible URL, and returns `{"reward": 1.0, "metrics": {...}, "error": null}`.
"""

import argparse
import contextlib
import importlib
import json
from collections.abc import AsyncIterator
from typing import Any

KEY = "VERIFIERS_SERVER_KEY"
"""Variable with an API key, which may be unset. It only prevents that episodes send another key to the policy."""


class Episodes:
    """The examples of an environment, and episodes on them.

    Args:
        taskset: Name of a taskset that `verifiers` can load.
        config: Further settings of the environment, such as `{"agent": {"harness": {"id": "null"}}}`.
        limit: Maximum number of examples, or None.
    """

    def __init__(self, taskset: str, config: dict[str, Any], limit: int | None):
        verifiers: Any = importlib.import_module("verifiers.v1")
        load_environment = importlib.import_module("verifiers.v1.utils.loaders").load_environment

        settings = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
        env_config = verifiers.SingleAgentEnvConfig.model_validate(settings)
        self.verifiers, self.env = verifiers, load_environment(env_config)
        view = self.env.taskset
        if limit is None and not view.bounded:
            raise SystemExit(f"error: {taskset} has no last example\n    fix: set --limit")
        self.tasks = list(view if limit is None else view.take(limit))

    def list_examples(self) -> list[dict[str, Any]]:
        """Return the id and the prompt of each example."""
        return [
            {"id": str(task.data.id or task.data.name or number), "prompt": _prompt(task.data.prompt)}
            for number, task in enumerate(self.tasks)
        ]

    async def run(self, example: int, url: str, model: str) -> dict[str, Any]:
        """Run one episode and return its reward, its metrics and its error."""
        client = self.verifiers.EvalClientConfig(base_url=url, api_key_var=KEY)
        context = self.verifiers.ModelContext(model=model, client=client)
        episode = await self.env.run_episode(self.tasks[example], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        metrics: dict[str, float] = {}
        for trace in episode.traces:
            metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        return {
            "reward": sum(trace.reward for trace in episode.traces) if episode.ok else None,
            "metrics": metrics,
            "error": None
            if episode.ok
            else "; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode failed",
        }


def _prompt(prompt: Any) -> Any:
    """Return a prompt as text or as messages of the chat API."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return [m if isinstance(m, dict) else m.model_dump(mode="json", exclude_none=True) for m in prompt]


def build_app(episodes: Episodes) -> Any:
    """Return the ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def examples(request: Any) -> Any:
        return JSONResponse({"examples": episodes.list_examples()})

    async def rollouts(request: Any) -> Any:
        fields = await request.json()
        number = fields.get("example")
        if not isinstance(number, int) or not 0 <= number < len(episodes.tasks):
            expected = f"a number from 0 to {len(episodes.tasks) - 1}"
            return JSONResponse({"error": f"example is {number!r}, expected {expected}"}, status_code=400)
        return JSONResponse(await episodes.run(number, fields["url"], fields.get("model", "policy")))

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with episodes.env.serving():
            yield

    routes = [Route("/examples", examples), Route("/rollouts", rollouts, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(description="Serve an environment of the package verifiers.")
    parser.add_argument("taskset", help="Name of the taskset.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on (default: 127.0.0.1).")
    parser.add_argument("--port", type=int, default=8100, help="Port to listen on (default: 8100).")
    parser.add_argument("--limit", type=int, help="Maximum number of examples (default: all).")
    parser.add_argument("--config", default="{}", help="Settings of the environment, as JSON (default: {}).")
    arguments = parser.parse_args()
    import uvicorn

    app = build_app(Episodes(arguments.taskset, json.loads(arguments.config), arguments.limit))
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
