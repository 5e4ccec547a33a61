"""`axlearn generate`."""

import sys

import click


@click.command()
@click.argument("uri", metavar="RUN_DIR|URI")
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="0 is greedy (default: as the model's files say, else 0)."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to use; default: the newest.")
def generate(uri: str, prompt: str, max_tokens: int, temperature: float | None, seed: int, step: int | None) -> None:
    """Write the prompt and the text with which a model continues it.

    Only the text goes to standard output. The model is that of a run, of a directory in Hugging Face format, of exported adapters
    (`DIR`, or `DIR?base=RUN_DIR` where the base has moved), or anything else that an installed plugin opens.
    """
    from axlearn_core.errors import escape_controls
    from axlearn_core.train.inference import load
    from axlearn_plugins_transformer.text.writing import write_text

    pieces = write_text(load(uri, step=step), prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
    first = next(pieces, "")  # what is wrong shows before anything is written
    # A model may write anything; a terminal does not get what would steer it.
    shown = escape_controls if sys.stdout.isatty() else str
    sys.stdout.write(shown(prompt + first))
    for piece in pieces:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
