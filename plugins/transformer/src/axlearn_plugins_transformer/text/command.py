"""The `axlearn generate` command."""

import sys

import click


@click.command()
@click.argument("uri", metavar="RUN_DIR|URI")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Maximum number of tokens."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="Sampling temperature; 0 is greedy (default: the model's, or 0).",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for sampling.")
@click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint (default: newest).")
def generate(uri: str, prompt: str, max_tokens: int, temperature: float | None, seed: int, step: int | None) -> None:
    """Print a prompt and the model's continuation.

    Only the text is written to standard output. The model can be a run, a directory in Hugging Face format, exported
    adapters (`DIR`, or `DIR?base=RUN_DIR` if the base has moved), or anything else that an installed plugin opens.
    """
    from axlearn_core.errors import escape_controls
    from axlearn_core.train.inference import load
    from axlearn_plugins_transformer.text.text_stream import write_text

    pieces = write_text(load(uri, step=step), prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
    first = next(pieces, "")  # raises errors before anything is written
    # A model may generate any text. Escape control sequences on terminals.
    shown = escape_controls if sys.stdout.isatty() else str
    sys.stdout.write(shown(prompt + first))
    for piece in pieces:
        sys.stdout.write(shown(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
