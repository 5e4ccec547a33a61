"""Time to the first token and cached tokens in each turn of an agent's conversation.

    uv run python benchmarks/agent_turns.py [--turns 30] [--conversations 3] [--model 88m|1b-layers] [--out FILE.json]

Starts `axlearn serve` on loopback with a random float32 Llama, the tokenizer `python-2k` and a chat template in the style
of Qwen 3. In each turn, the model calls a tool (`tool_choice: required`), and the next turn sends back the call and a
result. Both together have about 150 tokens, so each turn has about as many new tokens as the turn before, and a longer
prompt. A first conversation with another system message warms the server up. `1b-layers` has four layers with the shape of
those of Llama 3.2 1B: in wide layers, attention to a long prompt takes a smaller share of the time.

Reports, for some turns, the length of the prompt, the tokens that it shares with what the server computed for the turn
before, the cached and new tokens, and the time to the first token (TTFT). Times are medians over the conversations. The last
line is the median, over the conversations, of the TTFT of the last turn divided by that of turn 2.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from agent_conversation import Turn, converse
from large_requests import write_model
from serving import Server, started

from axlearn_plugins_transformer.text.tokenizers import TokenizerJson

FORECAST = {
    "name": "forecast",
    "description": "Return the weather of the next days.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo", "Bonn"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
DAY = '{"sky": "sunny", "degrees": 31, "wind": "light"}'


def bias_against_spaces() -> dict[str, float]:
    """Return a bias against white space, of which a random model writes dozens of tokens between two tokens of JSON."""
    tokenizer = TokenizerJson.Config(builtin="python-2k").build()
    texts = {str(token): tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    return {token: -100.0 for token, text in texts.items() if text[:1].isspace() and not text.strip(' \r\n\t":{},')}


def talk(client: httpx.Client, name: str, turns: int) -> list[Turn]:
    """Return the turns of a conversation that shares only the tools with conversations of other names."""
    first = [
        {"role": "system", "content": f"{name}: you plan journeys."},
        {"role": "user", "content": "Where is it warm? Look at the weather of every city before you answer."},
    ]
    body = {
        "tools": [{"type": "function", "function": FORECAST}], "tool_choice": "required", "parallel_tool_calls": False,
        "temperature": 1, "seed": 0, "max_tokens": 64, "logit_bias": bias_against_spaces(),
    }  # fmt: skip
    results = [json.dumps({"request": 100 + turn, "days": [DAY] * 2}) for turn in range(turns)]
    return list(converse(client, first, results, body))


def summarize(conversations: Sequence[Sequence[Turn]]) -> list[dict[str, Any]]:
    """Return the figures of each turn. The numbers of tokens come from the first conversation."""
    rows = []
    for number, same in enumerate(zip(*conversations, strict=True)):
        turn = same[0]
        shared = turn.count_shared(conversations[0][number - 1]) if number else 0
        ttft = statistics.median(each.seconds for each in same) * 1e3
        counts = {"prompt": len(turn.prompt), "shared": shared, "cached": turn.cached, "new": turn.new}
        rows.append({"turn": number + 1, **counts, "ttft_ms": ttft})
    return rows


def print_table(rows: Sequence[dict[str, Any]], turns: int) -> None:
    """Print the first turns, every fifth one, and the last."""
    print("| turn | prompt tokens | shared with the turn before | cached | new | TTFT, ms |\n|---|" + "---|" * 5)
    for row in rows:
        if row["turn"] <= 3 or row["turn"] % 5 == 0 or row["turn"] == turns:
            cells = [f"{row[name]:,}" for name in ("turn", "prompt", "shared", "cached", "new")]
            print(f"| {' | '.join(cells)} | {row['ttft_ms']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="turns per conversation (default: 30)")
    parser.add_argument("--conversations", type=int, default=3, help="measured conversations (default: 3)")
    parser.add_argument(
        "--model", choices=("88m", "1b-layers", "toy"), default="88m", help="size of the model (default: 88m)"
    )
    parser.add_argument("--context", type=int, default=8192, help="maximum number of tokens (default: 8192)")
    parser.add_argument("--python", default=sys.executable, help="Python interpreter of the server")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error(f"--turns: got {args.turns}, expected at least 2")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "llama"
        write_model(path, args.model)
        command = [args.python, "-m", "axlearn_core", "serve", str(path), "--port", "{port}"]
        for setting in (f"max_context={args.context}", "max_rows=4", "row_buckets=[1]"):
            command += ["--set", f"serving.runner.{setting}"]
        with (
            started(Server("axlearn", command), Path(scratch) / "log") as (url, _, _),
            httpx.Client(base_url=url, timeout=600, trust_env=False) as client,
        ):
            talk(client, "warm-up", args.turns)
            conversations = [talk(client, f"agent {i}", args.turns) for i in range(args.conversations)]
    rows = summarize(conversations)
    ratio = statistics.median(turns[-1].seconds / turns[1].seconds for turns in conversations)
    print(f"{platform.processor() or platform.machine()}, JAX {version('jax')}, {args.conversations} conversations\n")
    print_table(rows, args.turns)
    print(f"\nTTFT of turn {args.turns} / turn 2: {ratio:.2f}")
    if args.out:
        args.out.write_text(json.dumps({"model": args.model, "turns": rows, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
