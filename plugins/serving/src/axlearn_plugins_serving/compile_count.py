"""Counts what XLA compiles in this process, whoever asks for it."""

import threading
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"


class CompileCount:
    """Counts from where it is made.

    Attributes:
        total: programs that were compiled, or read from JAX's compilation cache.
        cached: of them those that the cache had.
        seconds: that all of them took.
    """

    def __init__(self) -> None:
        self.total, self.cached, self.seconds = 0, 0, 0.0
        self._lock = threading.Lock()  # several threads compile
        jax.monitoring.register_event_duration_secs_listener(self._count_compilation)
        jax.monitoring.register_event_listener(self._hit)

    @property
    def compiled(self) -> int:
        """Those that XLA compiled."""
        return self.total - self.cached

    def _count_compilation(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            with self._lock:
                self.total += 1
                self.seconds += duration_secs

    def _hit(self, event: str, **_: Any) -> None:
        if event == _CACHED:
            with self._lock:
                self.cached += 1
