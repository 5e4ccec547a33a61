"""Compiles named functions for one mesh: the one place where models are traced, lowered and compiled."""

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from axlearn_core.compose import executables
from axlearn_core.compose.functions import Array, Function, Part
from axlearn_core.compose.kernel_notes import KernelNotes
from axlearn_core.compose.layout import Layout
from axlearn_core.compose.options import check_refusal, merge_options
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError, unknown
from axlearn_core.kernels.selection import Choice, Selection, use
from axlearn_core.nn import sharding as nn_sharding
from axlearn_core.plugins.targets import load


class Compiler:
    """Functions by name, compiled for the devices of one layout.

    Attributes:
        functions: name -> function.
        layout: the mesh and the logical axes resolved on it.
        target: what is known of the hardware; None where no plugin knows it.
        platform: of the devices, by which kernels are chosen.
        parts: what each `Part` stands for: abstract arrays with their shardings.
        mesh: the config of the layout.
        kernel_notes: reports when another kernel runs than the one that the config names.
    """

    def __init__(
        self, functions: Mapping[str, Function], layout: Layout, mesh: Mesh, target: Target | None, parts: Any
    ):
        self.functions = dict(functions)
        self.layout, self.target = layout, target
        self.platform = target.platform if target else layout.mesh.devices.flat[0].platform
        self.parts: dict[Part, Any] = {Part.KEY: jax.eval_shape(lambda: jax.random.key(0)), **parts}
        self.mesh = mesh
        self.kernel_notes = KernelNotes()
        self._selections: dict[str, Selection] = {}
        self._jitted: dict[Any, Any] = {}
        self._compiled: dict[Any, Any] = {}
        self._compiling: dict[Any, threading.Lock] = {}
        self._guard, self._tracing = threading.Lock(), threading.RLock()
        self._exported: dict[tuple[str, str], tuple[Any, executables.Executable]] = {}
        self._identified: set[tuple[str, str]] = set()
        self._cached: set[Any] = set()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for all functions: the target's, and over them the config's."""
        return self._merge_options(())

    def _merge_options(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return merge_options(self.target.compiler_options if self.target else {}, choices, self.mesh.compiler_options)

    def options(self, name: str) -> dict[str, Any]:
        """XLA's options for a function that was traced: `compiler_options`, and those that its kernels need.

        Raises:
            ConfigError, PluginError: see `merge_options`.
        """
        if not self.function(name).runs_once:
            return self._merge_options(self.choices(name))
        # LLVM's third level takes three times as long to compile what runs once, and as fast at the first.
        return {"xla_backend_optimization_level": 1} if self.layout.mesh.devices.flat[0].platform == "cpu" else {}

    @property
    def compiled(self) -> Sequence[tuple[str, Any]]:
        """(function, bucket) of all that was compiled or loaded so far."""
        return [(name, bucket) for name, bucket, *_ in list(self._compiled)]

    def function(self, name: str) -> Function:
        """A function of the experiment; raises `RequestError` with the nearest names where there is none of this name."""
        if name not in self.functions:
            raise unknown("function of this experiment", name, self.functions)
        return self.functions[name]

    def selection(self, name: str) -> Selection:
        """The choice of kernels for a function."""
        if name not in self._selections:
            function = self.function(name)
            self._selections[name] = Selection(
                platform=self.platform,
                target=self.target.name if self.target else "",
                gradients=function.differentiates,
                required=None if function.differentiates else function.required_kernels,
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

    def arguments(self, name: str, bucket: object = None) -> tuple[Any, ...]:
        """The abstract arguments of a function for a bucket, with their shardings."""
        return jax.tree.map(self._resolve, self.function(name).inputs(bucket), is_leaf=_is_abstract)

    def trace(self, name: str, bucket: object = None) -> Any:
        """A function traced for a bucket: its jaxpr, and the choice of kernels."""
        with self._tracing:  # kernels are chosen, and recorded, meanwhile
            return self._trace(self._jit(name, bucket), name, bucket)

    def lower(self, name: str, bucket: object = None) -> Any:
        """A function lowered for a bucket."""
        return self._lower(self._jit(name, bucket), name, bucket)

    def compile(self, name: str, bucket: object = None, **options: object) -> Any:
        """A function compiled for a bucket, or loaded (see `load`); kept. `options` are XLA's, under the function's own.

        Several threads may compile: they trace one after another, and each function is compiled by one of them.

        Raises:
            RequestError: an unknown function, or an executable that was compiled from another program.
            ConfigError: the compiler refuses one of the config's options.
        """
        key = (name, _bucket_key(bucket), *sorted(options.items()))
        if key not in self._compiled:
            self._once(key, lambda: self._load(name, bucket, options) or self._compile(name, bucket, options))
        return self._compiled[key]

    def compile_all(self, functions: Sequence[tuple[str, Any]]) -> None:
        """Compiles (function, bucket) pairs, on CPU two at a time: each is traced by this thread, under its settings of JAX.

        Raises:
            RequestError, ConfigError: as `compile`.
        """
        # Elsewhere the compiler may measure kernels on the device, one at a time, and need much memory.
        several = self.layout.mesh.devices.flat[0].platform == "cpu"
        pool, compiling = ThreadPoolExecutor(2), []
        with CacheHits() as hits, ExitStack() as closing:
            closing.callback(pool.shutdown, cancel_futures=True)
            for name, bucket in functions:
                key = (name, _bucket_key(bucket))
                if not several or self.exported(name, bucket) or self._has_packed_arguments(name, bucket):
                    self.compile(name, bucket)
                elif key not in self._compiled:
                    lowered = self.lower(name, bucket)
                    make = functools.partial(self._compile_lowered, lowered, key, self.options(name), hits)
                    compiling.append(pool.submit(self._once, key, make))
            for future in compiling:
                future.result()

    def _once(self, key: Any, make: Callable[[], Any]) -> None:
        """Keeps what `make` gives, unless another thread has made it or is making it."""
        with self._guard:
            lock = self._compiling.setdefault(key, threading.Lock())
        with lock:
            if key in self._compiled:
                return
            try:
                self._compiled[key] = make()
            except jax.errors.JaxRuntimeError as error:
                check_refusal(self.choices(key[0]), self.mesh.compiler_options, str(error))
                raise

    def _load(self, name: str, bucket: Any, options: Mapping[str, Any]) -> Any:
        key = (name, str(_bucket_key(bucket)))
        if key not in self._exported or options:  # an export has the options of the function and no others
            return None
        identified = key in self._identified
        program = None if identified else executables.program_hash(self.lower(name, bucket), self.options(name))
        return executables.load(*self._exported[key], program, self.layout.mesh.devices)

    def _compile(self, name: str, bucket: object, options: Mapping[str, Any]) -> Any:
        if not self._has_packed_arguments(name, bucket):
            with CacheHits() as hits:
                lowered, key = self.lower(name, bucket), (name, _bucket_key(bucket))
                return self._compile_lowered(lowered, key, {**options, **self.options(name)}, hits)
        if not self.choices(name):
            self.trace(name, bucket)  # chooses the kernels, which may need options
        # With the options on the jitted function, JAX's dispatch takes what is compiled here.
        jitted = self._jit(name, bucket, {**options, **self.options(name)})
        return _Dispatched(self._lower(jitted, name, bucket).compile(), jitted)

    def _compile_lowered(
        self, lowered: Any, function: tuple[str, Any], options: Mapping[str, Any], hits: "CacheHits"
    ) -> Any:
        before = hits.count
        compiled = lowered.compile(compiler_options=dict(options) or None)
        if hits.count > before:
            self._cached.add(function)
        return compiled

    def _lower(self, jitted: Any, name: str, bucket: Any) -> Any:
        platform = self.layout.mesh.devices.flat[0].platform
        with self._tracing:
            traced = self._trace(jitted, name, bucket)
            with lowering(self.target):
                return traced.lower(lowering_platforms=("cuda" if platform == "gpu" else str(platform),))

    def _trace(self, jitted: Any, name: str, bucket: Any) -> Any:
        traced = jitted.trace(*self.arguments(name, bucket))
        self.kernel_notes.report(name, self.choices(name))
        return traced

    def _has_packed_arguments(self, name: str, bucket: object) -> bool:
        return any(_is_packed(spec) for spec in jax.tree.leaves(self.arguments(name, bucket)))

    def export(
        self,
        directory: str | os.PathLike[str],
        functions: Mapping[str, Sequence[Any]],
        identity: Mapping[str, str] | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes compiled functions, for `load` in another process on this machine or one just like it.

        Devices that are only described can be exported for; the executables load on devices that are what was described.

        Args:
            directory: is made; either all of it is written or nothing.
            functions: name -> buckets, such as `{"train": [batch], "decode": [bucket, ...]}`.
            identity: everything that the programs are made from, by name: `load` then need not trace to compare them.
            facts: see `executables.write`.

        Raises:
            RequestError: an unknown function, one of packed integers, or an existing directory.
        """
        executables.environment(self.layout.mesh.devices)
        compiled = {}
        for name, buckets in functions.items():
            for bucket in buckets:
                if self._has_packed_arguments(name, bucket):
                    raise RequestError(
                        f"{name} takes 4-bit integers: JAX could not call it once it is loaded\n"
                        "    fix: leave it out; it compiles where it is needed"
                    )
                program = executables.program_hash(self.lower(name, bucket), self.options(name))
                function = self.compile(name, bucket)
                if self.was_cached(name, bucket):
                    function = self._compile_anew(name, bucket)
                kernels = [(choice.op.path(), choice.name) for choice in self.choices(name)]
                compiled[name, str(_bucket_key(bucket))] = function, program, list(dict.fromkeys(kernels))
        executables.write(directory, self.layout.mesh.devices, compiled, identity, facts)

    def load(self, directory: str | os.PathLike[str], identity: Mapping[str, str] | None = None) -> list[str]:
        """Takes compiled functions from a directory that `export` wrote, instead of compiling them; returns their names.

        An executable is code: load only what you exported. Each is read when it is first needed, and only where it was
        compiled from the very program that this one would compile (which is traced and lowered to tell), by the same
        versions of JAX and its compiler, for the same kind of devices and host. With an `identity` equal to the exported one
        nothing is traced: whoever gives it answers for it that equal identities are equal programs.

        Raises:
            RequestError: the directory is not such an export, is damaged, or is of another version, machine or identity.
        """
        entries = executables.read_index(directory, self.layout.mesh.devices, identity)
        self._identified -= entries.keys()
        self._identified |= set() if identity is None else entries.keys()
        self._exported.update({key: (directory, entry) for key, entry in entries.items()})
        return list(dict.fromkeys(name for name, _ in entries))

    def exported(self, name: str, bucket: object = None) -> bool:
        """Whether `load` found a function for a bucket."""
        return (name, str(_bucket_key(bucket))) in self._exported

    def verify(self) -> None:
        """Compares the files of everything that `load` found with their hashes.

        Raises:
            RequestError: one is missing or damaged.
        """
        for directory, entry in self._exported.values():
            executables.read(directory, entry)

    def _compile_anew(self, name: str, bucket: Any) -> Any:
        """Compiles without JAX's compilation cache, on disk and in memory."""
        # An option at its default, so that JAX does not give what it compiled or read before.
        options = {**self.options(name), "xla_embed_ir_in_executable": False}
        before = jax.config.values["jax_enable_compilation_cache"]
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            return self.lower(name, bucket).compile(compiler_options=options)
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()

    def was_cached(self, name: str, bucket: Any = None) -> bool:
        """Whether a function for CPUs was read from JAX's compilation cache: XLA cannot write it a second time."""
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"
        return on_cpu and (name, _bucket_key(bucket)) in self._cached

    def discard(self, name: str, bucket: Any = None) -> None:
        """Forgets what was loaded for a bucket of a function, so that it is compiled."""
        if self._exported.pop((name, str(_bucket_key(bucket))), None) is not None:
            self._compiled = {k: v for k, v in self._compiled.items() if k[:2] != (name, _bucket_key(bucket))}

    def _jit(self, name: str, bucket: object, options: Mapping[str, Any] | None = None) -> Any:
        key = name, _bucket_key(bucket), *sorted((options or {}).items())
        if key not in self._jitted:
            function = self.function(name)

            def run(*args: object) -> Any:
                with self.tracing(name):
                    return function.call(*args, *((bucket,) if function.by_bucket else ()))

            shardings = None
            if function.outputs is not None:
                shardings = jax.tree.map(self._sharding, function.outputs(bucket), is_leaf=_is_abstract)
            elif self.layout.mesh.size == 1 and not jax.tree.leaves(self.arguments(name, bucket)):
                shardings = self.layout.replicated  # without arguments, only outputs say which device compiles it
            self._jitted[key] = jax.jit(
                run,
                donate_argnums=function.donate,
                out_shardings=shardings,
                compiler_options=dict(options or {}) or None,
            )
        return self._jitted[key]

    def _sharding(self, leaf: object) -> Any:
        if leaf is Part.REPLICATED:
            return self.layout.replicated
        return jax.tree.map(lambda spec: spec.sharding, self._resolve(leaf))

    def _resolve(self, leaf: object) -> Any:
        if isinstance(leaf, Part):
            return self.parts[leaf]
        if not isinstance(leaf, Array):
            return leaf
        sharding = self.layout.sharding(leaf.axes or (None,) * len(leaf.shape), leaf.shape, leaf.path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def lowering(target: Target | None) -> AbstractContextManager[Any]:
    """What has to hold while a program for a target is lowered, as its plugin says (`Target.lowering`)."""
    if target is None or target.lowering is None:
        return nullcontext()
    enter: Any = load(target.lowering)
    return enter(target)


class _Dispatched:
    """A compiled function of arrays with several numbers to a byte, called through JAX's dispatch.

    JAX's compiled functions ask for a packed layout of such arguments that committed arrays never say they have.
    """

    def __init__(self, compiled: Any, jitted: Callable[..., Any]):
        self._compiled, self._jitted = compiled, jitted

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


class CacheHits:
    """Counts what each thread takes from JAX's compilation cache while it is open."""

    def __enter__(self) -> "CacheHits":
        self._counts = Counter[int]()
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)

    @property
    def count(self) -> int:
        """Of the thread that asks."""
        return self._counts[threading.get_ident()]

    def _count(self, event: str, **_: Any) -> None:
        self._counts[threading.get_ident()] += event == "/jax/compilation_cache/cache_hits"


def _is_packed(spec: Any) -> bool:
    return is_array(spec) and spec.dtype in (jnp.int4, jnp.uint4)


def _bucket_key(bucket: object) -> Any:
    if not isinstance(bucket, Mapping):
        return bucket
    return tuple((name, tuple(value.shape), str(value.dtype)) for name, value in sorted(bucket.items()))


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, (Array, Part))
