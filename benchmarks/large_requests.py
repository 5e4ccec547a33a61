"""Effect of requests with megabytes on other clients: `/health` latency, pauses of a stream, and memory.

    uv run python benchmarks/large_requests.py [--requests 200] [--at-once 8] [--context 1024] [--kinds chat,tokens]
        [--out FILE.json]

Starts `axlearn serve` on loopback with a tiny random model, the tokenizer `python-2k` and a custom chat template. For
each kind of request, it sends bodies of almost 4 MiB concurrently, while one client streams text and another requests
`/health` every 20 ms. `idle` sends none and is the baseline. Reports the response statuses, percentiles in ms of
`/health` and of the gaps between the stream's events, and the server's resident memory in MB before, at its peak, and
after. The server has answered a warm-up request of the same kind before.

Exit code 1 if `/health` took 100 ms or more at p99, or if memory grew by more than 100 MB.
"""

import argparse
import asyncio
import contextlib
import importlib.resources
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import numpy as np
from serving import SIZES, Server, started, write_weights

from axlearn_plugins_transformer.text.tokenizers import TokenizerJson

BYTES = 4 * 2**20 - 1024
LIMIT_MS, LIMIT_MB = 100.0, 100.0
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n<tool_call>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _repeat(piece: str) -> str:
    return piece * (BYTES // len(piece.encode()))


def _items(item: str) -> str:
    return f"[{_repeat(item + ',')}{item}]"


def _chat(message: str, more: str = "") -> tuple[str, str]:
    return "/v1/chat/completions", f'{{"messages": [{message}], "max_tokens": 4{more}}}'


def _numbers() -> str:
    """Return the arguments of a call, with two million numbers."""
    return f'{{"a": {_items("1")}}}'


def _call(arguments: str) -> str:
    function = json.dumps({"name": "f", "arguments": arguments})
    return f'{{"role": "assistant", "tool_calls": [{{"id": "c", "type": "function", "function": {function}}}]}}'


def _messages(blocks: str) -> tuple[str, str]:
    return "/v1/messages", f'{{"max_tokens": 4, "messages": [{{"role": "user", "content": {blocks}}}]}}'


USER = '{"role": "user", "content": "a"}'
RESULT = '{"role": "tool", "tool_call_id": "c", "content": "sunny"}'
KINDS: dict[str, Callable[[], tuple[str, str]]] = {
    "chat": lambda: _chat(json.dumps({"role": "user", "content": _repeat("def f(x): return x + 1; ")[: BYTES - 200]})),
    "completion": lambda: ("/v1/completions", json.dumps({"prompt": _repeat("hello world ")})),
    "prompts": lambda: ("/v1/completions", json.dumps({"prompt": ["word " * 3200] * 256})),
    "tokens": lambda: ("/v1/completions", f'{{"prompt": {_items("1")}}}'),
    "responses": lambda: ("/v1/responses", json.dumps({"input": _repeat("hello world ")})),
    "parts": lambda: _chat(f'{{"role": "user", "content": {_items("{}")}}}'),
    "tools": lambda: _chat(
        USER, f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {_items("1")}}}}}}}]'
    ),
    "stop": lambda: ("/v1/completions", f'{{"prompt": "a", "stop": {_items(chr(34) + "x" + chr(34))}}}'),
    "bias": lambda: ("/v1/completions", json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(300_000)}})),
    "schema": lambda: _chat(
        USER,
        ', "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": '
        + _items("1")
        + "}}}",
    ),
    "unknown": lambda: ("/v1/completions", json.dumps({"prompt": "a"} | {f"f{i}": 1 for i in range(300_000)})),
    "arguments": lambda: _chat(_call(_numbers())),
    "text-arguments": lambda: _chat(_call(json.dumps({"a": _repeat("hello world ")}))),
    "history": lambda: _chat(_repeat(f"{USER}, {_call('{}')}, {RESULT}, ") + USER),
    "result": lambda: _chat(f"{_call('{}')}, {RESULT.replace('sunny', _repeat('sunny '))}"),
    "messages": lambda: _messages(json.dumps(_repeat("hello world "))),
    "blocks": lambda: _messages(_items('{"type": "tool_result", "tool_use_id": "c", "content": "a"}')),
    "stored": lambda: ("/v1/responses", json.dumps({"input": _repeat("hello world "), "store": True})),
    "calls": lambda: (
        "/v1/responses",
        json.dumps({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": _numbers()}]}),
    ),
    "embeddings": lambda: ("/v1/embeddings", json.dumps({"input": _repeat("hello world ")})),
    "tokenize": lambda: ("/tokenize", json.dumps({"prompt": _repeat("hello world ")})),
}


@attrs.define
class Watch:
    """Clients that large requests should not disturb."""

    client: httpx.AsyncClient
    pid: int
    health: list[float] = attrs.field(factory=list)
    gaps: list[float] = attrs.field(factory=list)
    highest: float = 0.0

    async def ask_health(self) -> None:
        """Request `/health` every 20 ms."""
        while True:
            begin = time.perf_counter()
            (await self.client.get("/health")).raise_for_status()
            self.health.append(time.perf_counter() - begin)
            self.highest = max(self.highest, resident(self.pid))
            await asyncio.sleep(0.02)

    async def stream(self) -> None:
        """Read one stream after another."""
        body = {"prompt": "def ", "max_tokens": 200, "stream": True, "ignore_eos": True}
        while True:
            async with self.client.stream("POST", "/v1/completions", json=body) as response:
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        self.gaps += [] if last is None else [now - last]
                        last = now


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in ms."""
    values = np.asarray(seconds) * 1e3
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def send(url: str, path: str, body: bytes, count: int, at_once: int) -> Counter[int]:
    """Send requests and return their statuses.

    Runs in a separate process so that it does not delay the watching clients.
    """

    async def run() -> list[int]:
        turns = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

            async def one() -> int:
                async with turns:
                    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                return answer.status_code

            return await asyncio.gather(*(one() for _ in range(count)))

    return Counter(asyncio.run(run()))


async def measured(sender: Executor, url: str, pid: int, kind: str, count: int, at_once: int) -> dict[str, Any]:
    """Return the figures of one kind of request."""
    path, text = KINDS[kind]() if kind != "idle" else ("", "")
    body, loop = text.encode(), asyncio.get_running_loop()
    if kind != "idle":
        await loop.run_in_executor(sender, send, url, path, body, min(count, at_once), at_once)
    await asyncio.sleep(2)
    before, begin = resident(pid), time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        watch = Watch(client, pid)
        watching = [asyncio.create_task(watch.ask_health()), asyncio.create_task(watch.stream())]
        if kind == "idle":
            await asyncio.sleep(10)
            statuses: Counter[int] = Counter()
        else:
            statuses = await loop.run_in_executor(sender, send, url, path, body, count, at_once)
        for task in watching:
            if task.done():
                task.result()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    seconds = time.perf_counter() - begin
    await asyncio.sleep(2)
    return {
        "bytes": len(body), "seconds": seconds, "statuses": dict(statuses), "health_ms": percentiles(watch.health),
        "stream_gap_ms": percentiles(watch.gaps), "before_mb": before, "highest_mb": watch.highest,
        "after_mb": resident(pid),
    }  # fmt: skip


def write_model(directory: Path, size: str = "toy") -> None:
    """Write a random Llama in Hugging Face format, with the tokenizer `python-2k` and a chat template that shows tools.

    Args:
        directory: Directory of the model, which does not exist yet.
        size: Name of the size, of `SIZES`.
    """
    tokenizer = TokenizerJson.Config(builtin="python-2k").build()
    llama = attrs.evolve(SIZES[size], vocabulary=tokenizer.vocab_size, context=131_072)
    directory.mkdir(parents=True)
    write_weights(llama, directory)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": llama.vocabulary, "hidden_size": llama.width,
        "intermediate_size": llama.hidden, "num_hidden_layers": llama.layers, "num_attention_heads": llama.heads,
        "num_key_value_heads": llama.kv_heads, "head_dim": llama.width // llama.heads, "max_position_embeddings": llama.context,
        "tie_word_embeddings": False, "eos_token_id": tokenizer.eos_id, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "dtype": llama.dtype,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    source = importlib.resources.files("axlearn_plugins_transformer.text").joinpath("python-2k.json")
    (directory / "tokenizer.json").write_bytes(source.read_bytes())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": tokenizer.eos_token, "chat_template": TEMPLATE})
    )


def row(kind: str, figures: dict[str, Any]) -> str:
    """Return a row of the table."""
    health, gaps = figures["health_ms"], figures["stream_gap_ms"]
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(figures["statuses"].items())) or "-"
    cells = [
        kind, statuses, f"{figures['seconds']:.1f}", *(f"{health[name]:.1f}" for name in ("p50", "p99", "max")),
        *(f"{gaps[name]:.1f}" for name in ("p99", "max")),
        *(f"{figures[name]:.0f}" for name in ("before_mb", "highest_mb", "after_mb")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests per kind")
    parser.add_argument("--at-once", type=int, default=8, help="concurrent requests")
    parser.add_argument("--context", type=int, default=1024, help="tokens")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--python", default=sys.executable, help="Python interpreter of the server")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds: got {unknown[0]!r}, expected some of {', '.join(KINDS)}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "llama"
        write_model(path)
        command = [args.python, "-m", "axlearn_core", "serve", str(path), "--port", "{port}"]
        settings = {"max_context": args.context, "max_rows": 4, "row_buckets": "[]", "chunk_buckets": "[]"}
        settings |= {"pooling": "last"}  # for `/v1/embeddings`
        for name, value in settings.items():
            command += ["--set", f"serving.runner.{name}={value}"]
        with (
            started(Server("axlearn", command), Path(scratch) / "log") as (url, _, pid),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender,
        ):
            for kind in ("idle", *kinds):
                results[kind] = asyncio.run(measured(sender, url, pid, kind, args.requests, args.at_once))
                print(row(kind, results[kind]), file=sys.stderr, flush=True)
    print(f"{platform.processor() or platform.machine()}, {args.requests} requests, {args.at_once} at a time\n")
    print(
        "| kind | statuses | s | health p50, ms | p99 | max | stream gap p99, ms | max | MB before | highest | after |"
    )
    print("|---|" + "---|" * 10)
    for kind, figures in results.items():
        print(row(kind, figures))
    if args.out:
        args.out.write_text(
            json.dumps({"options": vars(args) | {"out": str(args.out)}, "kinds": results}, indent=1) + "\n"
        )
    over = [
        kind
        for kind, f in results.items()
        if f["health_ms"]["p99"] >= LIMIT_MS or f["after_mb"] - f["before_mb"] > LIMIT_MB
    ]
    sys.exit(f"limits exceeded: {', '.join(over)}" if over else 0)


if __name__ == "__main__":
    main()
