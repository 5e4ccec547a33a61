"""The kernels of the op `grouped_matmul`, and what earlier versions wrote. Imports no JAX."""

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.migration import Migration
from axlearn_core.plugins.hookspecs import hookimpl

_MODULE = "axlearn_plugins_moe.grouped_matmul"


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Products by blocks of rows, for CPUs."""
    blocked = KernelImplementation(
        name="xla-blocked",
        op=f"{_MODULE}:GroupedMatmul",
        load=f"{_MODULE}:XLA_BLOCKED",
        priority=10,
        platforms=("cpu",),
    )
    return [blocked]


@hookimpl
def axlearn_migrations() -> list[Migration]:
    """Runs whose routers had their biases among the parameters."""
    module = "axlearn_plugins_moe.migrations"
    bias = Migration(
        name="the bias of a sigmoid router is a variable, and its rate a setting of the router",
        config=f"{module}:rules_to_rates",
        arrays=f"{module}:parameters_to_variables",
    )
    return [bias]
