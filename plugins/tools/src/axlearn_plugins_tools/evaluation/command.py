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
    help="File or glob of texts, conversations or questions. Can be repeated.",
)
@click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint (default: the newest).")
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of rows per --data.")
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Maximum length of a row (default: as in training).",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="New tokens per row of a long text (default: as many as fit).",
)
@click.option("--text-field", default="text", show_default=True, help="Field of a row that holds its text.")
@json_option
def evaluate(
    model: str, data: tuple[str, ...], step: int | None, limit: int | None, max_length: int | None, stride: int | None,
    text_field: str, as_json: bool,
) -> None:  # fmt: skip
    """Evaluate a model on texts, chats or multiple-choice questions.

    The model is a run, a directory in Hugging Face format, or exported adapters.

    Rows with `text`, and text files, get perplexity and bits per byte. Rows with `messages` get the same for the
    assistant's messages. Rows with `prompt`, `choices` and `answer` get the accuracy of the most likely choice.
    """
    from axlearn_plugins_tools.evaluation.data import read
    from axlearn_plugins_tools.evaluation.evaluate import evaluate as run
    from axlearn_plugins_tools.evaluation.subjects import subject_in

    # Read all the data before loading the model, so that errors in the data are reported early.
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
