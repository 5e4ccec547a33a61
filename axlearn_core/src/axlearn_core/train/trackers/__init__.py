"""Trackers: where a run's scalars and samples go. Each meets `axlearn_core.contracts.parts.Tracker`."""

from axlearn_core.train.trackers.console import ConsoleTracker
from axlearn_core.train.trackers.jsonl import JsonlTracker

__all__ = ["ConsoleTracker", "JsonlTracker"]
