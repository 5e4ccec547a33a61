"""Which microbatch a stage works on at which tick.

Layers are split into `stages * rounds` chunks of consecutive layers, and chunk `r * stages + s` is run by stage `s`: with
one round this is GPipe (Huang et al., 2019), with more the interleaved schedule of Narayanan et al., 2021, in which every
stage has `rounds` chunks, and microbatches go around in groups of as many as there are stages.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Work(NamedTuple):
    """What a stage does at a tick.

    Attributes:
        valid: whether there is anything; what is computed otherwise is thrown away.
        microbatch: its index.
        round: which of the stage's chunks runs.
    """

    valid: Any
    microbatch: Any
    round: Any


class Schedule(NamedTuple):
    """A static schedule for `stages` stages, `microbatches` microbatches and `rounds` chunks of layers per stage."""

    stages: int
    microbatches: int
    rounds: int = 1

    @property
    def ticks(self) -> int:
        """How long it takes, in times that one chunk takes for one microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of that time in which a stage has nothing to do."""
        return (self.stages - 1) / self.ticks

    def work(self, tick: Any, stage: Any) -> Work:
        """The work of a stage at a tick, ints or traced.

        The output of the last stage reaches the first one tick later, which is when its next round begins: nothing has
        to wait anywhere.
        """
        item = tick - stage
        valid = (item >= 0) & (item < self.rounds * self.microbatches)
        item = jnp.clip(item, 0, self.rounds * self.microbatches - 1)
        group, within = item // (self.stages * self.rounds), item % (self.stages * self.rounds)
        if self.rounds == 1:
            return Work(valid, item, jnp.zeros_like(item))
        return Work(valid, group * self.stages + within % self.stages, within // self.stages)


class OneForwardOneBackward(NamedTuple):
    """A static schedule in which each stage goes backward through a microbatch as soon as it can (1F1B).

    Narayanan et al., 2019, in lockstep: at a tick every stage takes one microbatch forward and one backward. In the first
    `stages - 1` ticks there is nothing to take backward yet, in the last nothing to take forward, so that the idle time is
    that of GPipe. What a stage keeps are the inputs of at most `slots` microbatches, for any number of them.
    """

    stages: int
    microbatches: int

    @property
    def slots(self) -> int:
        """How many microbatches the first stage has taken forward and not yet backward."""
        return 2 * self.stages - 1

    @property
    def phases(self) -> tuple[range, range, range]:
        """The ticks with forward work alone, those with both kinds, those with backward work alone."""
        fill, drain = self.stages - 1, self.microbatches + self.stages - 1
        return range(fill), range(fill, drain), range(drain, drain + fill)

    def forward(self, tick: Any, stage: Any) -> Work:
        """The microbatch that a stage takes forward at a tick, ints or traced."""
        return self._work(tick - stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """The microbatch that a stage takes backward at a tick, after its forward work."""
        return self._work(tick - (2 * (self.stages - 1) - stage))

    def _work(self, item: Any) -> Work:
        index = jnp.clip(item, 0, self.microbatches - 1)
        return Work((item >= 0) & (item < self.microbatches), index, jnp.zeros_like(index))
