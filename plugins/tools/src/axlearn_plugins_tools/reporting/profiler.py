"""Trace training steps with JAX's profiler, for TensorBoard or Perfetto."""

from pathlib import Path
from typing import Any

import jax

from axlearn_core.config import Configurable, node, setting


class Profiler(Configurable):
    """Writes a trace of `steps` steps, beginning at `start_step`, to `<run>/profile`."""

    @node
    class Config(Configurable.Config["Profiler"]):
        """Settings for `Profiler`.

        Attributes:
            start_step: Number of finished steps before the trace. The first steps compile and should be excluded.
            steps: Number of steps to trace.
        """

        start_step: int = setting(default=10, ge=0)
        steps: int = setting(default=3, ge=1)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.start, self.stop, self.directory = cfg.start_step, cfg.start_step + cfg.steps, run_dir / "profile"
        self.running = False

    def before(self, step: int) -> None:
        """Start the trace at the start step."""
        if step == self.start:
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def after(self, step: int, scalars: Any) -> None:
        """Stop the trace when its last step is done."""
        if self.running and step >= self.stop:
            jax.block_until_ready(scalars)
            self.close()

    def close(self) -> None:
        """Stop the trace if it is running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
