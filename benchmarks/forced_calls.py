"""Compare the throughput of required tool calls with that of free answers.

    uv run python benchmarks/forced_calls.py [--rounds 5] [--requests 32] [--out FILE.json]

Serves the random Llama of 88 million float32 parameters of `serving.py` with a byte-level tokenizer of 8,192 tokens, which is
trained on this repository's documentation. In each round, 16 clients at a time send chat requests with the same tool, once with
`tool_choice: required` and once with `tool_choice: auto`, in turns. Every answer has 64 tokens: the tool's argument is a text of at
least 10,000 characters, and free answers ignore the end token. Reports output tokens/s, and the median and range of the ratios
required / free. Prompts differ in every request.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from serving import SIZES, Server, started, write_model

DOCS = Path(__file__).parents[1] / "docs"
SHOW_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TEMPLATE = SHOW_TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 10_000}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
TOKENS = 64
CLIENTS = 16


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Train a byte-level BPE tokenizer on the documentation."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in DOCS.glob("*.md")], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


async def measure(url: str, choice: str, seed: int, requests: int) -> float:
    """Send requests, and return the output tokens per second."""
    words = DOCS.joinpath("training.md").read_text().split()
    turns = asyncio.Semaphore(CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=900) as client:

        async def ask(number: int) -> int:
            start = (seed * 997 + number * 61) % (len(words) - 200)
            text = f"{choice} {seed} {number} " + " ".join(words[start : start + 100])
            body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "tools": [TOOL]}
            body |= {"tool_choice": choice, "max_tokens": TOKENS, "ignore_eos": True}
            async with turns:
                answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            if (choice == "required") != ("tool_calls" in answer.json()["choices"][0]["message"]):
                sys.exit(f"not the expected kind of answer: {answer.text[:500]}")
            return answer.json()["usage"]["completion_tokens"]

        begin = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, range(requests))))
        return tokens / (time.perf_counter() - begin)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--model", choices=SIZES, default="88m")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {"required": [], "auto": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(SIZES[args.model], model)
        write_tokenizer(model, SIZES[args.model].vocabulary)
        command = [
            sys.executable,
            "-m",
            "axlearn_core",
            "serve",
            str(model),
            "--port",
            "{port}",
            "--tool-parser",
            "none",
        ]
        with started(Server("axlearn", command), Path(folder) / "server.log") as (url, _, _):
            for choice in speeds:
                asyncio.run(measure(url, choice, 1000, CLIENTS))  # warm up with other prompts
            for number in range(args.rounds):
                for choice in ("required", "auto") if number % 2 else ("auto", "required"):
                    speeds[choice].append(asyncio.run(measure(url, choice, number, args.requests)))
                print(
                    f"round {number}: " + ", ".join(f"{c} {s[-1]:.1f} tokens/s" for c, s in speeds.items()), flush=True
                )
    ratios = [r / f for r, f in zip(speeds["required"], speeds["auto"], strict=True)]
    print(f"required / free: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if args.out:
        Path(args.out).write_text(json.dumps({"tokens_per_second": speeds, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
