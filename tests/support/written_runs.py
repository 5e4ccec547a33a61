"""Run directories that are written without training."""

import json

from axlearn_core.checkpoint import ShardedCheckpointer

LOCK = {
    "hash": "aaaa",
    "versions": {"jax": "0.10.2"},
    "python": "3.11.7",
    "devices": "1 x cpu",
    "flags": {},
    "data": {"files": 3, "content": "c0", "tokenizer": "t0"},
    "hlo_fingerprint": "f0",
    "provenance": {"learner.rate": [{"by": "experiment toy", "value": "0.1"}, {"by": "--set learner.rate=0.2"}]},
}


def record(step, **values):
    return {"step": step, "loss": 2.0 / step, "elapsed_seconds": 60.0 * step, "step_seconds": 1.0, **values}


def write_run(folder, *, rate=0.1, seed=0, lock=LOCK, records=None, checkpoints=None):
    """Write a run. `checkpoints` has the arrays of each step."""
    folder.mkdir(parents=True)
    text = f"resolved: true\ntype: trainer\nseed: {seed}\nlearner: {{rate: {rate}}}\ninput: {{batch_size: 4}}\n"
    (folder / "config.yaml").write_text(text)
    if lock is not None:
        (folder / "run.lock.json").write_text(json.dumps(lock))
    records = [record(1), record(2), record(4)] if records is None else records
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if checkpoints:
        checkpointer = ShardedCheckpointer.Config(keep_last=None).build(directory=folder / "checkpoints")
        for step, arrays in checkpoints.items():
            checkpointer.save(step, arrays, extra={"data": {"batches": step}})
        checkpointer.close()
    return folder
