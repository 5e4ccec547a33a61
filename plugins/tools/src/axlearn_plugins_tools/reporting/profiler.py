"""A window of steps traced by JAX's profiler, for TensorBoard or Perfetto."""

from pathlib import Path
from typing import Any

import jax

from axlearn_core.config import Configurable, node, setting


class Profiler(Configurable):
    """Writes a trace of `steps` steps, from `start_step` on, to `<run>/profile`."""

    @node
    class Config(Configurable.Config["Profiler"]):
        """`start_step` counts finished steps; the first steps compile and are best left out."""

        start_step: int = setting(default=10, ge=0)
        steps: int = setting(default=3, ge=1)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.start, self.stop, self.directory = cfg.start_step, cfg.start_step + cfg.steps, run_dir / "profile"
        self.running = False

    def before(self, step: int) -> None:
        """Starts the trace where the window begins."""
        if step == self.start:
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def after(self, step: int, scalars: Any) -> None:
        """Ends the trace where the window ends, once the step is done."""
        if self.running and step >= self.stop:
            jax.block_until_ready(scalars)
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
