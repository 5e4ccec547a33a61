"""`axlearn bench serve`."""

import os
import sys
from typing import Any

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Of the server.")
@click.option("--model", metavar="NAME", help="Default: the first that the server lists.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--num-prompts", type=click.IntRange(min=1), default=100, show_default=True, help="Requests to send.")
@click.option("--input-len", metavar="N|LOW:HIGH", default="128", show_default=True, help="Tokens of prompts.")
@click.option("--output-len", metavar="N|LOW:HIGH", default="64", show_default=True, help="The most tokens of outputs.")
@click.option(
    "--prefix-len", type=click.IntRange(min=0), default=0, help="Tokens that all prompts begin with, in addition."
)
@click.option("--concurrency", type=click.IntRange(min=1), help="The most requests at one time.")
@click.option(
    "--request-rate", type=click.FloatRange(min=0, min_open=True), help="Requests per second, by a Poisson process."
)
@click.option(
    "--goodput", multiple=True, metavar="NAME:MS", help="What a good request keeps: ttft:500, tpot:50, e2el:9000."
)
@click.option("--ignore-eos", is_flag=True, help="Outputs go on after the end token; an extension that vLLM has too.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of lengths, tokens, arrivals.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Other requests before those that count."
)
@click.option(
    "--vocab-size", type=click.IntRange(min=2), help="Of random tokens; default: what the server tells, or 1000."
)
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json that makes texts of random tokens, for chats.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True, help="Seconds."
)
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable with the server's API key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def serve(**options: Any) -> None:
    """Measure a server of the OpenAI API: latencies, throughput, failures.

    TTFT, TPOT, ITL and E2EL are defined as `vllm bench serve` defines them. Exit code 1 where a request failed.
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
                raise WorkError(f"the first request failed: {record.error}")
        records, seconds = await measure(client, load, bodies, _progress(len(bodies)))
    summary = summarize(records, seconds, goals)
    names = ("endpoint", "concurrency", "request_rate", "input_len", "output_len", "prefix_len", "ignore_eos", "seed")
    return summary | {"url": options["url"], "model": model, "options": {name: options[name] for name in names}}


def _key(options: dict[str, Any]) -> str | None:
    from axlearn_core.errors import RequestError

    variable = options["api_key_env"]
    if variable is not None and not os.environ.get(variable):
        raise RequestError(f"the environment variable {variable} is not set\n    fix: put the API key into it")
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
