"""Pipeline schedules: the microbatch that each stage works on at each tick.

Layers are split into `stages * rounds` chunks of consecutive layers. Stage `s` runs the chunks `r * stages + s`. With one round
this is GPipe (Huang et al., 2019). With more rounds it is the interleaved schedule of Narayanan et al., 2021: every stage has
`rounds` chunks, and groups of `stages` microbatches pass through the stages once per round.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Work(NamedTuple):
    """The work of a stage at a tick.

    Attributes:
        valid: Whether there is work. If not, the result is discarded.
        microbatch: Index of the microbatch.
        round: Index of the stage's chunk.
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
        """Length of the schedule, in units of the time that a chunk takes to process a microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """Fraction of ticks in which a stage is idle."""
        return (self.stages - 1) / self.ticks

    def work(self, tick: Any, stage: Any) -> Work:
        """Return the work of a stage at a tick. Both may be ints or traced values.

        The output of the last stage reaches the first stage one tick later, exactly when its next round begins. Outputs
        therefore never wait in a buffer.
        """
        item = tick - stage
        valid = (item >= 0) & (item < self.rounds * self.microbatches)
        item = jnp.clip(item, 0, self.rounds * self.microbatches - 1)
        group, within = item // (self.stages * self.rounds), item % (self.stages * self.rounds)
        if self.rounds == 1:
            return Work(valid, item, jnp.zeros_like(item))
        return Work(valid, group * self.stages + within % self.stages, within // self.stages)


class OneForwardOneBackward(NamedTuple):
    """A static schedule in which each stage runs the backward pass of a microbatch as early as possible (1F1B).

    This is the schedule of Narayanan et al., 2019, in lockstep: at each tick, every stage runs one forward and one backward pass.
    The first `stages - 1` ticks have no backward work and the last `stages - 1` ticks have no forward work, so the idle time equals
    GPipe's. A stage saves the inputs of at most `slots` microbatches, however many there are in total.
    """

    stages: int
    microbatches: int

    @property
    def slots(self) -> int:
        """Maximum number of microbatches between the forward and the backward pass of the first stage."""
        return 2 * self.stages - 1

    @property
    def phases(self) -> tuple[range, range, range]:
        """Ticks with only forward work, with both kinds of work, and with only backward work."""
        fill, drain = self.stages - 1, self.microbatches + self.stages - 1
        return range(fill), range(fill, drain), range(drain, drain + fill)

    def forward(self, tick: Any, stage: Any) -> Work:
        """Return the forward work of a stage at a tick. Both may be ints or traced values."""
        return self._work(tick - stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """Return the backward work of a stage at a tick, which follows its forward work."""
        return self._work(tick - (2 * (self.stages - 1) - stage))

    def _work(self, item: Any) -> Work:
        index = jnp.clip(item, 0, self.microbatches - 1)
        return Work((item >= 0) & (item < self.microbatches), index, jnp.zeros_like(index))
