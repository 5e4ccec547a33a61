"""Compile a function for a machine that may be absent, and determine how much device memory the function needs."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from axlearn_core.compose.compiler import Compiler
from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import WorkError
from axlearn_core.plugins.targets import load
from axlearn_plugins_plan.buffers import Dump, open_dump
from axlearn_plugins_plan.memory import Memory, compiled_memory, parse_out_of_memory, shard_bytes

_STAND_IN: Mapping[str, Any] = {"xla_backend_optimization_level": 0}
"""XLA options for a stand-in on XLA:CPU. Only its HLO is read, so LLVM optimizations would waste time."""


@contextlib.contextmanager
def disable_compilation_cache() -> Iterator[None]:
    """Disable JAX's persistent cache, which can write programs for absent devices but cannot read them back."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    try:
        settings.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        settings.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def compile_function(program: Compiler, function: str, bucket: Any, machine: Machine) -> tuple[Any, Memory]:
    """Compile a function of a program for a machine.

    Args:
        program: Program composed for the machine.
        function: Name of the function.
        bucket: Shapes of the function's arguments.
        machine: Machine to compile for.

    Returns:
        (compiled function, memory). The function is None if the compiler ran out of device memory.

    Raises:
        WorkError: The compiler stopped for a different reason.
    """
    with _buffers(program, machine) as dump, _skip_assembly(machine.target) as options:
        try:
            with disable_compilation_cache():
                compiled = program.compile(function, bucket, **options, **(dump.options if dump else {}))
        except jax.errors.JaxRuntimeError as error:
            arguments = shard_bytes(program.arguments(function, bucket))
            memory = parse_out_of_memory(str(error), arguments, machine, dump.read() if dump else None)
            if memory is None:
                raise WorkError(f"the compiler stopped: {error}") from error
            return None, memory
        return compiled, compiled_memory(compiled, machine, dump.read() if dump else None)


def _skip_assembly(target: Target) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
    """Return a context manager that yields XLA options for a program that never runs."""
    if target.stand_in:
        return contextlib.nullcontext(_STAND_IN)
    if target.skip_assembly is None:
        return contextlib.nullcontext({})
    enter: Any = load(target.skip_assembly)
    return enter()


def _buffers(program: Compiler, machine: Machine) -> contextlib.AbstractContextManager[Dump | None]:
    """Open a dump of the buffer assignment on TPUs, whose memory statistics overstate usage. Yields None elsewhere."""
    if machine.target.platform != "tpu" or machine.target.stand_in:
        return contextlib.nullcontext()
    return open_dump(program.compiler_options)
