"""Processor time that does not depend on how fast the machine happens to be.

On a shared machine, the same tests were seen to use 19 to 38 s of processor time, depending on what else ran on the physical core.
So test processes repeat a fixed piece of work while they run, and the total is scaled by how long it took.
"""

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

STANDARD = 0.022
"""Seconds of processor time of `probe` at the standard speed, by definition. With Python 3.11 and JAX 0.10, shared cores of an AMD
EPYC of family 25 took 0.035 to 0.05 s."""
INTERVAL = 5.0
"""Seconds of processor time of this process between two probes."""

_numbers = itertools.count()


def _program(number: int) -> Callable[[Any], Any]:
    """Return a small program that JAX has not compiled before."""
    from jax import nn, numpy

    return lambda x: nn.softmax(numpy.tanh(x @ x.T + number) @ x, axis=-1).sum()


def probe() -> float:
    """Return the seconds of processor time that JAX takes to trace and compile a small program.

    Most of the tests' time is spent like this, so a slower processor or a smaller cache affects both alike. It takes the shorter
    of two times, because threads of tests may run at the same time.
    """
    import jax

    inputs, times = jax.ShapeDtypeStruct((16, 16), "float32"), []
    for _ in range(2):
        start = time.process_time()
        jax.jit(_program(next(_numbers))).lower(inputs).compile()
        times.append(time.process_time() - start)
    return min(times)


class SpeedMeter:
    """Measures the speed of the processor while a process runs. Processes that have not imported JAX measure nothing.

    Attributes:
        samples: Seconds of the probes.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._next = time.process_time()

    def sample(self) -> None:
        """Probe the processor if the process has worked long enough since the last probe."""
        if (now := time.process_time()) >= self._next and "jax" in sys.modules:
            self.samples.append(probe())
            self._next = now + INTERVAL


def standard_seconds(seconds: float, samples: list[float]) -> float:
    """Return the processor time that the same work takes on the standard machine.

    Args:
        seconds: Seconds of processor time on this machine.
        samples: Seconds of the probes, taken at equal intervals of that time. Without any, the time is not scaled.
    """
    # Each interval does work in proportion to the speed of the processor, so average the speeds, not the times.
    speeds = [STANDARD / sample for sample in samples]
    return seconds * sum(speeds) / len(speeds) if speeds else seconds
