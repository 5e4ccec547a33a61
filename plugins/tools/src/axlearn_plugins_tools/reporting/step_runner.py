"""Compute steps of a run again: restore its state, position its data, and train. Nothing here writes to the run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.checkpoint.base import WEIGHTS_ONLY, StorageCheckpointer
from axlearn_core.compose import Program
from axlearn_core.config import Node
from axlearn_core.contracts.capabilities import DescribesPosition, LoadsInitialWeights, vocabulary_size
from axlearn_core.run import Run
from axlearn_core.run.stored_config import CHECKPOINTS
from axlearn_core.train.data_facts import plain_facts
from axlearn_core.train.objective import ObjectiveWeights

HostBatch = Mapping[str, np.ndarray]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ComputedStep:
    """A step that was computed again.

    Attributes:
        number: Number of the step, from 1.
        batch: Batch on the host.
        scalars: Scalars of the step.
        state: State after the step.
        before: State before the step. None unless it was kept.
        position: Position of the batch in the data, or None if the input does not know it. Its `str` is for use in messages.
    """

    number: int
    batch: HostBatch
    scalars: Mapping[str, float]
    state: Any
    before: Any = None
    position: Any = None


@attrs.frozen(kw_only=True, eq=False, repr=False)
class StepRunner:
    """The program, state and data of a run, ready to compute steps again.

    Attributes:
        program: Program that computes the steps.
        batches: The data, positioned at its beginning until `position_data` is called.
        state: State after `start` steps.
        start: Step of the restored checkpoint, or 0 for the initial state.
        extra: Data of the checkpoint other than arrays. Empty for the initial state.
        facts: Facts about the current data.
    """

    program: Program
    batches: Any
    state: Any
    start: int
    extra: Mapping[str, Any]
    facts: Mapping[str, Any]

    @classmethod
    def open(cls, program: Program, checkpointer: Any, start: int, closing: ExitStack) -> "StepRunner":
        """Open the data and restore the state.

        Args:
            program: Program of the run.
            checkpointer: Reads the checkpoints; see `open_checkpoints`.
            start: Step of a checkpoint, or 0 for the initial state.
            closing: Closes the data stream.

        Raises:
            InputError: If the data cannot be read.
            CheckpointError: If the checkpoint does not fit the program, or if it is damaged.
        """
        config: Any = program.config
        source = config.build_input(config.input, vocabulary_size(program.functional.describe()))
        batches = source.train()
        closing.callback(batches.close)
        facts = plain_facts(source.describe())
        if start:
            state, extra = restore_state(checkpointer, program, start)
        else:
            state, extra = ObjectiveWeights.open(program).load(program.init(config.seed)), {}
        return cls(program=program, batches=batches, state=state, start=start, extra=extra, facts=facts)

    def recorded_facts(self, lock: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the facts about the data that the checkpoint recorded, or else those in the run's lock."""
        return self.extra.get("facts") or lock.get("data") or {}

    def position_data(self) -> None:
        """Move the data to the batch of the first step."""
        if "data" in self.extra:
            self.batches.set_state(self.extra["data"])

    def run(self, last: int, *, keep: bool = False) -> Iterator[ComputedStep]:
        """Compute the steps after `start`, up to and including `last`.

        Args:
            last: Last step.
            keep: Keep a copy of the state before the last step. This needs memory for a second state.
        """
        state, knows_position = self.state, isinstance(self.batches, DescribesPosition)
        for number in range(self.start + 1, last + 1):
            batch = next(self.batches)
            position = self.batches.describe_position() if knows_position else None
            before = jax.tree.map(jnp.copy, state) if keep and number == last else None
            state, scalars = self.program.train_step(state, self.program.put(batch))
            values = {name: float(np.asarray(value)) for name, value in scalars.items()}
            yield ComputedStep(
                number=number, batch=batch, scalars=values, state=state, before=before, position=position
            )


def open_checkpoints(run: Run, cfg: Node[Any]) -> Any:
    """Build a checkpointer that only reads the checkpoints of a run. A tier on local disks is left untouched."""
    if not isinstance(cfg, StorageCheckpointer.Config):
        return cfg.build(directory=Path(run.uri) / CHECKPOINTS)
    if isinstance(cfg, ShardedCheckpointer.Config):
        cfg = ShardedCheckpointer.Config(every_steps=cfg.every_steps)
    return attrs.evolve(cfg, uri=None).build(directory=run.checkpoints.name)


def read_checkpoint(checkpointer: Any, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Read the state and `extra` of a checkpoint, without changing anything in storage."""
    if isinstance(checkpointer, StorageCheckpointer):
        # A subclass's own `restore` may prepare to continue the run.
        return StorageCheckpointer.restore(checkpointer, step, like)
    return checkpointer.restore(step, like)


def restore_state(checkpointer: Any, program: Program, step: int) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint's state and `extra`. Weights without a training state start a new state, as in training."""
    state, extra = read_checkpoint(checkpointer, step, program.state)
    if extra.get(WEIGHTS_ONLY):
        config: Any = program.config
        state = ObjectiveWeights.open(program).load(program.begin(config.seed, state))
    return state, extra


def unwrap_loop(loop: Any) -> tuple[Any, bool]:
    """Return a loop that loads no initial weights, and whether the original loop loads them."""
    loads = False
    while isinstance(loop, LoadsInitialWeights):
        loop, loads = loop.without_initial_weights(), True
    return loop, loads
