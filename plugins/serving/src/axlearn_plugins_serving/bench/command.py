"""`axlearn bench serve`."""

import os
import sys
from typing import Any

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.option("--url", metavar="URL", default="http://127.0.0.1:8000", show_default=True, help="Server URL.")
@click.option("--model", metavar="NAME", help="Model (default: the server's first).")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="API to call.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    metavar="N",
    default=100,
    show_default=True,
    help="Number of requests.",
)
@click.option("--input-len", metavar="N|LOW:HIGH", default="128", show_default=True, help="Prompt length in tokens.")
@click.option("--output-len", metavar="N|LOW:HIGH", default="64", show_default=True, help="Output limit in tokens.")
@click.option(
    "--prefix-len", type=click.IntRange(min=0), metavar="N", default=0, help="Length of an extra, shared prefix."
)
@click.option("--concurrency", type=click.IntRange(min=1), metavar="N", help="Maximum concurrent requests.")
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="RATE",
    help="Requests per second, Poisson arrivals.",
)
@click.option("--goodput", multiple=True, metavar="NAME:MS", help="Latency limit for goodput: ttft, tpot or e2el.")
@click.option("--ignore-eos", is_flag=True, help="Generate past the end token, as in vLLM.")
@click.option(
    "--temperature", type=click.FloatRange(0, 2), metavar="T", default=0.0, show_default=True, help="Temperature."
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Random seed.")
@click.option(
    "--warmup", type=click.IntRange(min=0), metavar="N", default=1, show_default=True, help="Warm-up requests."
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=2),
    metavar="N",
    help="Vocabulary size for random prompts (default: ask the server, or 1000).",
)
@click.option("--tokenizer", metavar="FILE", help="tokenizer.json for chats of random tokens.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="Request timeout.",
)
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable with the API key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve(**options: Any) -> None:
    """Measure latencies, throughput and failures of an OpenAI API server.

    TTFT, TPOT, ITL and E2EL are defined as in `vllm bench serve`. Exit code 1 if a request failed.
    """
    import asyncio
    import json

    from axlearn_plugins_serving.bench.latency_figures import render

    summary = asyncio.run(_measure(**options))
    echo(json.dumps(summary, indent=2) if options["as_json"] else render(summary))
    sys.exit(1 if summary["failed"] else 0)


async def _measure(**options: Any) -> dict[str, Any]:
    import attrs

    from axlearn_core.errors import WorkError
    from axlearn_plugins_serving.bench.client import find_model, measure, new_client, send
    from axlearn_plugins_serving.bench.latency_figures import summarize
    from axlearn_plugins_serving.bench.load import Lengths, Load, parse_goodput

    load = Load(
        endpoint=options["endpoint"],
        count=options["num_prompts"],
        input=Lengths.parse(options["input_len"], "--input-len"),
        output=Lengths.parse(options["output_len"], "--output-len"),
        prefix=options["prefix_len"],
        seed=options["seed"],
        ignore_eos=options["ignore_eos"],
        temperature=options["temperature"],
        rate=options["request_rate"] or float("inf"),
        concurrency=options["concurrency"],
    )
    goals, key, tokenizer = parse_goodput(options["goodput"]), _key(options), _tokenizer(options["tokenizer"])
    async with new_client(options["url"], key, options["timeout"]) as client:
        model, vocabulary = await find_model(client, options["model"])
        vocab_size = options["vocab_size"] or vocabulary or 1000
        bodies = load.bodies(model, vocab_size=vocab_size, tokenizer=tokenizer)
        warm = attrs.evolve(load, count=options["warmup"])
        for body in warm.bodies(model, vocab_size=vocab_size, tokenizer=tokenizer, warm_up=True):
            record = await send(client, load.endpoint, body)
            if record.error is not None:
                raise WorkError(f"the warm-up request failed: {record.error}")
        records, seconds = await measure(client, load, bodies, _progress(len(bodies)))
    summary = summarize(records, seconds, goals)
    names = ("endpoint", "concurrency", "request_rate", "input_len", "output_len", "prefix_len", "ignore_eos", "seed")
    return summary | {"url": options["url"], "model": model, "options": {name: options[name] for name in names}}


def _key(options: dict[str, Any]) -> str | None:
    from axlearn_core.errors import RequestError

    variable = options["api_key_env"]
    if variable is not None and not os.environ.get(variable):
        raise RequestError(f"the environment variable {variable} is not set\n    fix: set it to the API key")
    return os.environ[variable] if variable is not None else None


def _tokenizer(path: str | None) -> Any:
    if path is None:
        return None
    from axlearn_plugins_transformer.text.tokenizers import TokenizerJson

    return TokenizerJson.Config(path=path).build()


def _progress(count: int) -> Any:
    if not sys.stderr.isatty():
        return lambda count_done: None

    def show(count_done: int) -> None:
        click.echo(f"\r{count_done} of {count}" + ("\n" if count_done == count else ""), err=True, nl=False)

    return show
