"""Trackers: where a run's scalars and samples go. Each meets `axlearn_core.contracts.parts.Tracker`."""

from axlearn_core.train.trackers.jsonl import JsonlTracker
from axlearn_core.train.trackers.lines import LinesTracker

__all__ = ["JsonlTracker", "LinesTracker"]
