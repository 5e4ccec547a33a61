"""Compiles named functions for one mesh: the one place where models are traced, lowered and compiled."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax

from axlearn_core.compose.functions import Array, Function, Part
from axlearn_core.compose.layout import Layout
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import ConfigError, Problem, unknown
from axlearn_core.kernels.selection import Choice, Selection, use
from axlearn_core.nn import sharding as nn_sharding


class Compiler:
    """Functions by name, compiled for the devices of one layout.

    Attributes:
        functions: name -> function.
        layout: the mesh and the logical axes resolved on it.
        target: what is known of the hardware; None where no plugin knows it.
        platform: of the devices, by which kernels are chosen.
        parts: what each `Part` stands for: abstract arrays with their shardings.
    """

    def __init__(
        self, functions: Mapping[str, Function], layout: Layout, mesh: Mesh, target: Target | None, parts: Any
    ):
        self.functions = dict(functions)
        self.layout, self.target = layout, target
        self.platform = target.platform if target else layout.mesh.devices.flat[0].platform
        self.parts: dict[Part, Any] = {Part.KEY: jax.eval_shape(lambda: jax.random.key(0)), **parts}
        self._mesh_config = mesh
        self._selections: dict[str, Selection] = {}
        self._jitted: dict[Any, Any] = {}
        self._compiled: dict[Any, Any] = {}

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for the functions: the target's, and over them the config's."""
        return {**(self.target.compiler_options if self.target else {}), **self._mesh_config.compiler_options}

    def function(self, name: str) -> Function:
        """A function of the experiment; raises `RequestError` with the nearest names where there is none of this name."""
        if name not in self.functions:
            raise unknown("function of this experiment", name, self.functions)
        return self.functions[name]

    def selection(self, name: str) -> Selection:
        """The choice of kernels for a function."""
        if name not in self._selections:
            self._selections[name] = Selection(
                platform=self.platform,
                target=self.target.name if self.target else "",
                gradients=self.function(name).differentiates,
            )
        return self._selections[name]

    def choices(self, name: str = "train") -> list[Choice]:
        """Which kernel each call site of a function got, once it was traced."""
        return self.selection(name).choices

    def tracing(self, name: str, kernels: Selection | None = None) -> AbstractContextManager[Any]:
        """What a function is traced under: the mesh, its rules, and a selection of kernels (by default its own)."""
        stack = ExitStack()
        stack.enter_context(nn_sharding.logical_rules(self.layout.mesh, self.layout.rules))
        stack.enter_context(use(kernels or self.selection(name)))
        return stack

    def arguments(self, name: str, bucket: Any = None) -> tuple[Any, ...]:
        """The abstract arguments of a function for a bucket, with their shardings."""
        return jax.tree.map(self._resolve, self.function(name).inputs(bucket), is_leaf=_is_abstract)

    def trace(self, name: str, bucket: Any = None) -> Any:
        """A function traced for a bucket: its jaxpr, and the choice of kernels."""
        return self._jit(name, bucket).trace(*self.arguments(name, bucket))

    def lower(self, name: str, bucket: Any = None) -> Any:
        """A function lowered for a bucket."""
        platform = self.layout.mesh.devices.flat[0].platform
        return self.trace(name, bucket).lower(lowering_platforms=("cuda" if platform == "gpu" else str(platform),))

    def compile(self, name: str, bucket: Any = None, **options: Any) -> Any:
        """A function compiled for a bucket; kept. `options` are XLA's, under `compiler_options`.

        Raises:
            RequestError: there is no such function.
            ConfigError: the compiler refuses one of the config's options.
        """
        key = (name, _bucket_key(bucket), *sorted(options.items()))
        if key not in self._compiled:
            lowered = self.lower(name, bucket)
            try:
                self._compiled[key] = lowered.compile(compiler_options={**options, **self._options(name)} or None)
            except jax.errors.JaxRuntimeError as error:
                _check_options(self._mesh_config.compiler_options, str(error))
                raise
        return self._compiled[key]

    def _options(self, name: str) -> dict[str, Any]:
        if not self.function(name).runs_once:
            return self.compiler_options
        # LLVM's third level takes three times as long to compile what runs once, and as fast at the first.
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"
        return {"xla_backend_optimization_level": 1} if on_cpu else {}

    def _jit(self, name: str, bucket: Any) -> Any:
        key = name, _bucket_key(bucket)
        if key not in self._jitted:
            function = self.function(name)

            def run(*args: Any) -> Any:
                with self.tracing(name):
                    return function.call(*args, *((bucket,) if function.by_bucket else ()))

            shardings = None
            if function.outputs is not None:
                shardings = jax.tree.map(self._sharding, function.outputs(bucket), is_leaf=_is_abstract)
            self._jitted[key] = jax.jit(run, donate_argnums=function.donate, out_shardings=shardings)
        return self._jitted[key]

    def _sharding(self, leaf: Any) -> Any:
        if leaf is Part.REPLICATED:
            return self.layout.replicated
        return jax.tree.map(lambda spec: spec.sharding, self._resolve(leaf))

    def _resolve(self, leaf: Any) -> Any:
        if isinstance(leaf, Part):
            return self.parts[leaf]
        if not isinstance(leaf, Array):
            return leaf
        sharding = self.layout.sharding(leaf.axes or (None,) * len(leaf.shape), leaf.shape, leaf.path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bucket_key(bucket: Any) -> Any:
    if not isinstance(bucket, Mapping):
        return bucket
    return tuple((name, tuple(value.shape), str(value.dtype)) for name, value in sorted(bucket.items()))


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, (Array, Part))


def _check_options(options: Mapping[str, Any], refusal: str) -> None:
    """Raises `ConfigError` where XLA's `refusal` to compile is about one of the config's options for it."""
    for name, value in options.items():
        if refusal.startswith("INVALID_ARGUMENT: ") and name in re.findall(r"\w+", refusal):
            said = refusal.removeprefix("INVALID_ARGUMENT: ")
            raise ConfigError(Problem(path=f"mesh.compiler_options.{name}", message=said, got=repr(value)))
