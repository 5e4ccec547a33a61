"""`axlearn generate`."""

import sys

import click


@click.command()
@click.argument("uri", metavar="RUN_DIR|URI")
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to use; default: the newest.")
def generate(uri: str, prompt: str, max_tokens: int, temperature: float, seed: int, step: int | None) -> None:
    """Writes the prompt and what a model continues it with; only the text, on standard output.

    The model is that of a run, of a directory in Hugging Face format, of exported adapters (`DIR`, or `DIR?base=RUN_DIR` where
    the base has moved), or whatever else an installed plugin opens.
    """
    from axlearn_core.errors import RequestError
    from axlearn_core.train.inference import generate_text, load

    loaded = load(uri, step=step)
    if loaded.tokenizer is None:
        raise RequestError("this run's input has no tokenizer, so its model cannot write text")
    sys.stdout.write(prompt)
    for piece in generate_text(
        loaded.model, loaded.tokenizer, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
