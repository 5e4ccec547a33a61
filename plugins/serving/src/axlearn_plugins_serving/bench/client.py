"""The benchmark's client, which sends the requests of a load and measures each one."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from axlearn_core.errors import RequestError, WorkError
from axlearn_plugins_serving.bench.latency_figures import Record
from axlearn_plugins_serving.bench.load import Endpoint, Load

_PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def new_client(url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    """Create a client for the server at `url`, without connection limits.

    Raises:
        RequestError: If `url` is not an HTTP URL.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise RequestError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(f"--url {url}: not an HTTP URL\n    expected: a URL such as http://127.0.0.1:8000")
    return httpx.AsyncClient(
        base_url=base,
        timeout=timeout,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        trust_env=False,
    )


async def find_model(client: httpx.AsyncClient, model: str | None) -> tuple[str, int | None]:
    """Return a model's name, and its vocabulary size if the server reports it.

    If `model` is None, the first model on the server is used.

    Raises:
        WorkError: If the server does not answer.
        RequestError: If the server does not have the model.
    """
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        models = {m["id"]: m for m in response.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        if model is not None and isinstance(error, httpx.HTTPStatusError):
            return model, None
        raise WorkError(
            f"{client.base_url} does not list its models: {str(error) or type(error).__name__}\n"
            "    fix: start the server, or check --url"
        ) from None
    name = model or next(iter(models), None)
    if name is None or (models and name not in models):
        raise RequestError(f"{client.base_url} has no model {name!r}\n    it has: {', '.join(models) or 'none'}")
    return name, models[name].get("vocab_size")


async def send(client: httpx.AsyncClient, endpoint: Endpoint, body: Mapping[str, Any]) -> Record:
    """Send a request and read its stream."""
    start = last = time.perf_counter()
    first: float | None = None
    gaps: list[float] = []
    pieces: list[str] = []
    usage: Mapping[str, Any] = {}
    try:
        async with client.stream("POST", _PATHS[endpoint], json=dict(body)) as response:
            if response.status_code != 200:
                await response.aread()
                return Record(error=_error_message(response))
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return Record(error=str(event["error"].get("message", event["error"])))
                usage = event.get("usage") or usage
                if not event.get("choices"):
                    continue
                now = time.perf_counter()
                if first is None:
                    first = now
                else:
                    gaps.append(now - last)
                last = now
                choice = event["choices"][0]
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
        return Record(error=f"{type(error).__name__}: {error}")
    if first is None:
        return Record(error="the stream ended without a token")
    if "completion_tokens" not in usage:
        return Record(error="the server reports no usage for stream_options.include_usage")
    return Record(
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        output_tokens=usage["completion_tokens"],
        ttft=first - start,
        itl=tuple(gaps),
        e2el=last - start,
        text="".join(pieces),
    )


def _error_message(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"HTTP {response.status_code}: {message}"


async def measure(
    client: httpx.AsyncClient,
    load: Load,
    bodies: Sequence[Mapping[str, Any]],
    progress: Callable[[int], None] = lambda count: None,
) -> tuple[list[Record], float]:
    """Send requests at their arrival times.

    If there is a `concurrency` limit, a request may wait before it is sent. Its latencies do not include this wait.

    Returns:
        One record per body, and the total time in seconds.
    """
    turns = asyncio.Semaphore(load.concurrency or len(bodies))
    count_done = 0

    async def send_one(body: Mapping[str, Any]) -> Record:
        nonlocal count_done
        async with turns:
            record = await send(client, load.endpoint, body)
        count_done += 1
        progress(count_done)
        return record

    start = time.perf_counter()
    tasks = []
    for body, due in zip(bodies, load.arrivals(), strict=True):
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(send_one(body)))
    records = await asyncio.gather(*tasks)
    return records, time.perf_counter() - start
