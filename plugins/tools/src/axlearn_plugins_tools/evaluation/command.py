"""`axlearn evaluate`."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table


@click.command()
@click.argument("model", metavar="RUN_DIR|HF_DIR|URI")
@click.option(
    "--data",
    "data",
    multiple=True,
    required=True,
    metavar="FILES",
    help="A file or a glob of texts, conversations or questions; more than once for several results.",
)
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to use; default: the newest.")
@click.option("--limit", type=click.IntRange(min=1), help="Evaluate on the first so many rows of each only.")
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="The longest row; default: that of the run's input.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="How many new tokens each row of a long text has; default: as many as fit.",
)
@click.option("--text-field", default="text", show_default=True, help="The field of a row that holds its text.")
@json_option
def evaluate(
    model: str, data: tuple[str, ...], step: int | None, limit: int | None, max_length: int | None, stride: int | None,
    text_field: str, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate a model on texts, conversations or multiple-choice questions.

    The model is that of a run, of a directory in Hugging Face format, or of exported adapters.

    A row with `text` (or a text file) is scored by perplexity and bits per byte, one with `messages` by those of the
    assistant's part, and one with `prompt`, `choices` and `answer` by whether the right choice is the likeliest.
    """
    from axlearn_plugins_tools.evaluation.data import read
    from axlearn_plugins_tools.evaluation.evaluate import evaluate as run
    from axlearn_plugins_tools.evaluation.subjects import subject_in

    # All data is read before the model is: what is wrong with it shows at once.
    sets = {name: read(name, text_field=text_field, limit=limit) for name in data}
    subject = subject_in(model, step=step, length=max_length)
    results = [{"name": n, "kind": d.kind, **run(subject, d, stride=stride)} for n, d in sets.items()]
    if as_json:
        print_json(results)
        return
    print_table([_row(r) for r in results], ("name", "kind", "rows", "results"))


def _row(result: dict[str, Any]) -> dict[str, Any]:
    values = {k: v for k, v in result.items() if isinstance(v, float) and not k.endswith("_stderr")}
    errors = {k.removesuffix("_stderr"): v for k, v in result.items() if k.endswith("_stderr")}
    texts = (f"{k} {v:.4g}" + (f" ± {errors[k]:.2g}" if k in errors else "") for k, v in values.items())
    return {**{k: result[k] for k in ("name", "kind", "rows")}, "results": "  ".join(texts)}
