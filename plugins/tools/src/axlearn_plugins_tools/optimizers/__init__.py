"""Optimizers for axlearn beyond AdamW: the `muon` and `schedule-free` components."""

from axlearn_plugins_tools.optimizers.muon import Muon
from axlearn_plugins_tools.optimizers.schedule_free import ScheduleFree

__all__ = ["Muon", "ScheduleFree"]
