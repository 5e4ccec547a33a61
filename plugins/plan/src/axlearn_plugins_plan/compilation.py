"""A function compiled for a machine that need not be here, and what it takes of a device's memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from axlearn_core.compose.compiler import Compiler
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import WorkError
from axlearn_plugins_plan.buffers import Dump, open_dump
from axlearn_plugins_plan.memory import Memory, of_compiled, of_refusal, shard_bytes

_NEVER_RUN = {"xla_backend_optimization_level": 0}
"""What XLA:CPU makes in another's stead is read as HLO: LLVM need not improve it."""


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """JAX's persistent cache left alone: it keeps programs for devices that are absent, and cannot read them back."""
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
    """(the compiled function, its memory); no function where the compiler refused it for lack of memory.

    Args:
        program: composed for the machine.
        function: its name.
        bucket: the shapes of its arguments.
        machine: what it is compiled for.

    Raises:
        WorkError: the compiler stopped for another reason.
    """
    options: dict[str, Any] = dict(_NEVER_RUN) if machine.target.stand_in else {}
    with _buffers(program, machine) as dump:
        try:
            with uncached():
                compiled = program.compile(function, bucket, **options, **(dump.options if dump else {}))
        except jax.errors.JaxRuntimeError as error:
            arguments = shard_bytes(program.arguments(function, bucket))
            memory = of_refusal(str(error), arguments, machine, dump.read() if dump else None)
            if memory is None:
                raise WorkError(f"the compiler stopped: {error}") from error
            return None, memory
        return compiled, of_compiled(compiled, machine, dump.read() if dump else None)


def _buffers(program: Compiler, machine: Machine) -> contextlib.AbstractContextManager[Dump | None]:
    """Where the compiler says how it lays out its buffers: for TPUs, whose statistics say something else."""
    if machine.target.platform != "tpu" or machine.target.stand_in:
        return contextlib.nullcontext()
    return open_dump(program.compiler_options)
