"""Small training runs in this process, on its eight devices. `cli_runs` starts them from the command line."""

import json

import axlearn_core as ax
from axlearn_core.learn import AdamW

SMALL = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 16,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 16,
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
}
"""Sizes of a model and batches that train in seconds."""
SETTINGS = {**SMALL, "learner.optimizer": AdamW(learning_rate=0.01), "log_every_steps": 1}
REPLICAS = {"mesh.shape": {"data": 4, "fsdp": 2}}
"""Four devices hold the same shards."""


def train(run, *features, steps, **settings):
    return ax.train("quickstart", with_=list(features), set=SETTINGS | settings, steps=steps, run_dir=run)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["loss"] for line in lines(run) if "loss" in line]
