"""A counter of compilations in this process."""

import threading
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHED = "/jax/compilation_cache/cache_hits"


class CompileCount:
    """Counts XLA compilations since it was created.

    Attributes:
        total: Programs compiled or read from JAX's compilation cache.
        cached: Programs read from the cache.
        seconds: Total time, in seconds.
    """

    def __init__(self) -> None:
        self.total, self.cached, self.seconds = 0, 0, 0.0
        self._lock = threading.Lock()  # several threads compile
        jax.monitoring.register_event_duration_secs_listener(self._count_compilation)
        jax.monitoring.register_event_listener(self._count_cache_hit)

    @property
    def compiled(self) -> int:
        """Programs that XLA compiled."""
        return self.total - self.cached

    def _count_compilation(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            with self._lock:
                self.total += 1
                self.seconds += duration_secs

    def _count_cache_hit(self, event: str, **_: Any) -> None:
        if event == _CACHED:
            with self._lock:
                self.cached += 1
