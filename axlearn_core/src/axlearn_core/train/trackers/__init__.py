"""Trackers: where a run's scalars and samples go. Each meets `axlearn_core.contracts.parts.Tracker`."""

from axlearn_core.train.trackers.console import ConsoleTracker
from axlearn_core.train.trackers.jsonl import JsonlTracker
from axlearn_core.train.trackers.tensorboard import TensorBoardTracker
from axlearn_core.train.trackers.wandb import WandbTracker

__all__ = ["ConsoleTracker", "JsonlTracker", "TensorBoardTracker", "WandbTracker"]
