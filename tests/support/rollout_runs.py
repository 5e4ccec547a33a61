"""Training runs on rollouts of sums, started from the command line at toy size."""

import json

from support import cli_runs

TIMES = ("seconds", "per_second", "rollout_wait", "mfu")
"""Ends of the names of metrics that measure time."""


def write_sums(folder, *, train=40, held_out=8):
    """Write the files `train.jsonl` and `held_out.jsonl` of a `jsonl-task`, and return the task as a setting."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(7) for b in range(7)]
    for name, part in (("train", rows[:train]), ("held_out", rows[train : train + held_out])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return f"{{type: jsonl-task, paths: {folder}/train.jsonl, validation_paths: {folder}/held_out.jsonl}}"


def arguments(run, task, *, steps, ahead=0, settings=(), method="grpo", options="kl=0", features=()):
    """Return the arguments of `axlearn train` for a run with bit-identical rollouts."""
    options = f"task={task},batch_size=4,group_size=4,max_tokens=4,ahead={ahead},{options}"
    more = tuple(word for f in (f"{method}:{options}", "batch-invariant", *features) for word in ("--with", f))
    toy = (
        "model.vocab_size=264",
        "model.decoder.hidden_dim=64",  # parity needs products of this width
        "input.tokenizer={type: byte-tokenizer}",
        "input.sequence_length=16",
        "loop.policy.engine.runner.mode=parity",
        "loop.reward={type: format, pattern: '[a-zA-Z0-9](?s:.*)'}",  # a model without training earns it at times
        "checkpointer.every_steps=2",
        "trackers=[{type: jsonl}]",
        *settings,
    )
    return cli_runs.arguments(run, steps=steps, settings=("input.batch_size=4", *toy), more=more)


def curves(run):
    """Return the metrics of each step that do not measure time."""
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in cli_runs.metrics(run)]


def rollouts(run):
    """Return the contents of the files of rollouts by name."""
    return {path.name: path.read_bytes() for path in sorted((run / "rollouts").glob("*.jsonl"))}
