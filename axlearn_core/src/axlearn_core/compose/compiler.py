"""Trace, lower, and compile named functions for a mesh."""

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from axlearn_core.compose.options import check_refusal, merge_options, quick_options
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError, unknown
from axlearn_core.kernels.selection import Choice, Selection, use
from axlearn_core.nn import sharding as nn_sharding
from axlearn_core.plugins.targets import load


class Compiler:
    """Compiles functions for the devices of one layout.

    Attributes:
        functions: Functions by name.
        layout: Device mesh with resolved logical axes.
        target: Facts about the hardware, or None if no plugin describes it.
        platform: Platform of the devices, which determines the available kernels.
        parts: Abstract arrays with shardings for each `Part`.
        mesh: Mesh config.
        kernel_notes: Reports calls that do not use the kernel that the config names.
        attachments: Objects that callers made for this program, such as results of `compile_trial`. They live as long as it does.
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
        self.attachments: dict[Hashable, Any] = {}
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
        """XLA options for all functions. The config overrides the target."""
        return self._merge_options(())

    def _merge_options(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return merge_options(self.target.compiler_options if self.target else {}, choices, self.mesh.compiler_options)

    def options(self, name: str) -> dict[str, Any]:
        """Return the XLA options for a traced function: `compiler_options`, plus the options that its kernels require.

        Raises:
            ConfigError, PluginError: See `merge_options`.
        """
        if not self.function(name).runs_once:
            return self._merge_options(self.choices(name))
        # Optimization level 3 of LLVM triples the compile time. A function that runs once does not benefit.
        return {"xla_backend_optimization_level": 1} if self.layout.mesh.devices.flat[0].platform == "cpu" else {}

    @property
    def compiled(self) -> Sequence[tuple[str, Any]]:
        """Functions that have been compiled or loaded, each with its bucket."""
        return [(name, bucket) for name, bucket, *_ in list(self._compiled)]

    def function(self, name: str) -> Function:
        """Return a function by name. Raise `RequestError` with the nearest names if it does not exist."""
        if name not in self.functions:
            raise unknown("function of this experiment", name, self.functions)
        return self.functions[name]

    def selection(self, name: str) -> Selection:
        """Return the kernel selection for a function."""
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
        """Return the kernel choices for a traced function, one per distinct call."""
        return self.selection(name).choices

    def tracing(self, name: str, kernels: Selection | None = None) -> AbstractContextManager[Any]:
        """Activate the mesh, its rules, and a kernel selection for tracing. The default selection is the function's."""
        stack = ExitStack()
        stack.enter_context(nn_sharding.logical_rules(self.layout.mesh, self.layout.rules))
        stack.enter_context(use(kernels or self.selection(name)))
        return stack

    def compile_trial(self, call: Callable[..., Any], name: str = "train", kernels: Selection | None = None) -> Any:
        """Compile a function that the program does not declare. Most optimizations are off, since it is called only a few times.

        Args:
            call: Function of arrays. It is traced once for each call to this method and each combination of argument shapes.
            name: Function of the program whose mesh rules and kernels it uses.
            kernels: Kernel selection to use instead of that function's.
        """

        def run(*args: object) -> Any:
            with self.tracing(name, kernels):
                return call(*args)

        return jax.jit(run, compiler_options=quick_options(self.platform) or None)

    def trial_text(
        self, call: Callable[..., Any], arguments: Sequence[Any], name: str = "train", kernels: Selection | None = None
    ) -> str:
        """Return the lowered text of a function that the program does not declare; see `compile_trial`.

        Args:
            call: Function of arrays.
            arguments: Arrays, or their abstract shapes.
            name: Function of the program whose mesh rules and kernels it uses.
            kernels: Kernel selection to use instead of that function's.
        """
        with lowering(self.target):
            return self.compile_trial(call, name, kernels).lower(*arguments).as_text()

    def arguments(self, name: str, bucket: object = None) -> tuple[Any, ...]:
        """Return a function's abstract arguments for a bucket, with shardings."""
        return jax.tree.map(self._resolve, self.function(name).inputs(bucket), is_leaf=_is_abstract)

    def trace(self, name: str, bucket: object = None) -> Any:
        """Trace a function for a bucket. This records the kernel choices."""
        with self._tracing:  # tracing selects and records kernels
            return self._trace(self._jit(name, bucket), name, bucket)

    def lower(self, name: str, bucket: object = None) -> Any:
        """Lower a function for a bucket."""
        return self._lower(self._jit(name, bucket), name, bucket)

    def compile(self, name: str, bucket: object = None, **options: object) -> Any:
        """Compile a function for a bucket, or load it if it was exported (see `load`). The result is cached.

        This may be called from several threads. Tracing is serialized, and each function is compiled once.

        Args:
            name: Name of the function.
            bucket: Bucket of the function; see `Function.inputs`.
            options: XLA options. The function's options override them.

        Raises:
            RequestError: If the function is unknown, or if its executable was compiled from a different program.
            ConfigError: If the compiler rejects one of the config's options.
        """
        key = (name, _bucket_key(bucket), *sorted(options.items()))
        if key not in self._compiled:
            self._compute_once(key, lambda: self._load(name, bucket, options) or self._compile(name, bucket, options))
        return self._compiled[key]

    def compile_all(self, functions: Sequence[tuple[str, Any]]) -> None:
        """Compile (function, bucket) pairs, two at a time on CPUs. The calling thread traces them with its JAX config.

        Raises:
            RequestError, ConfigError: See `compile`.
        """
        # On other platforms, the compiler may benchmark kernels on the device and need a lot of memory.
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
                    compiling.append(pool.submit(self._compute_once, key, make))
            for future in compiling:
                future.result()

    def _compute_once(self, key: Any, make: Callable[[], Any]) -> None:
        """Cache the result of `make`. If another thread is already computing it, wait instead."""
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
        if key not in self._exported or options:  # exports are compiled with only the function's own options
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
            self.trace(name, bucket)  # selects the kernels, which may require options
        # Set the options on the jitted function, so that JAX's dispatch uses the program that is compiled here.
        jitted = self._jit(name, bucket, {**options, **self.options(name)})
        return _DispatchedFunction(self._lower(jitted, name, bucket).compile(), jitted)

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
        """Export compiled functions, so that another process on the same kind of machine can `load` them.

        The devices may be descriptions of devices that are not present. The executables load on real devices that match the
        description.

        Args:
            directory: New directory, which is written atomically.
            functions: Buckets by function name, such as `{"train": [batch], "decode": [bucket, ...]}`.
            identity: Everything that determines the programs, by name. If given, `load` does not need to trace the programs.
            facts: See `executables.write`.

        Raises:
            RequestError: If a function is unknown or has packed integer arguments, or if the directory already exists.
        """
        executables.environment(self.layout.mesh.devices)
        compiled = {}
        for name, buckets in functions.items():
            for bucket in buckets:
                if self._has_packed_arguments(name, bucket):
                    raise RequestError(
                        f"{name} takes 4-bit integers, and JAX cannot call such functions after loading them\n"
                        "    fix: do not export it; it is compiled when needed"
                    )
                program = executables.program_hash(self.lower(name, bucket), self.options(name))
                function = self.compile(name, bucket)
                if self.was_cached(name, bucket):
                    function = self._compile_without_cache(name, bucket)
                kernels = [(choice.op.path(), choice.name) for choice in self.choices(name)]
                compiled[name, str(_bucket_key(bucket))] = function, program, list(dict.fromkeys(kernels))
        executables.write(directory, self.layout.mesh.devices, compiled, identity, facts)

    def load(self, directory: str | os.PathLike[str], identity: Mapping[str, str] | None = None) -> list[str]:
        """Use the compiled functions in a directory that `export` wrote, instead of compiling them. Return their names.

        Executables contain native code, so only load your own exports. Each executable is loaded when it is first needed. It
        must match the program that would be compiled, the versions of JAX and the compiler, and the kind of devices and
        host. To compare programs, this traces and lowers them, unless `identity` is given and equals the exported identity.
        The caller must ensure that equal identities imply equal programs.

        Raises:
            RequestError: If the directory is not an export or is damaged, or if the version, machine, or identity differs.
        """
        entries = executables.read_index(directory, self.layout.mesh.devices, identity)
        self._identified -= entries.keys()
        self._identified |= set() if identity is None else entries.keys()
        self._exported.update({key: (directory, entry) for key, entry in entries.items()})
        return list(dict.fromkeys(name for name, _ in entries))

    def exported(self, name: str, bucket: object = None) -> bool:
        """Return True if `load` found an executable for this function and bucket."""
        return (name, str(_bucket_key(bucket))) in self._exported

    def verify(self) -> None:
        """Verify the hashes of all files that `load` found.

        Raises:
            RequestError: If a file is missing or damaged.
        """
        for directory, entry in self._exported.values():
            executables.read(directory, entry)

    def _compile_without_cache(self, name: str, bucket: Any) -> Any:
        """Compile without JAX's compilation caches on disk and in memory."""
        # Setting the default value explicitly changes the cache key, so that JAX does not return an earlier result.
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
        """Return True if a CPU function came from JAX's compilation cache. XLA cannot serialize such functions."""
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"
        return on_cpu and (name, _bucket_key(bucket)) in self._cached

    def discard(self, name: str, bucket: Any = None) -> None:
        """Discard the loaded executable for a function and bucket, so that the next call compiles it."""
        if self._exported.pop((name, str(_bucket_key(bucket))), None) is not None:
            self._compiled = {k: v for k, v in self._compiled.items() if k[:2] != (name, _bucket_key(bucket))}

    def _jit(self, name: str, bucket: object, options: Mapping[str, Any] | None = None) -> Any:
        key = name, _bucket_key(bucket), *sorted((options or {}).items())
        if key not in self._jitted:
            function = self.function(name)

            def run(*args: object) -> Any:
                with self.tracing(name):
                    return function.call(*args, *((bucket,) if function.takes_bucket else ()))

            shardings = None
            if function.outputs is not None:
                shardings = jax.tree.map(self._sharding, function.outputs(bucket), is_leaf=_is_abstract)
            elif self.layout.mesh.size == 1 and not jax.tree.leaves(self.arguments(name, bucket)):
                shardings = self.layout.replicated  # without arguments, the outputs determine the device
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
    """Return the context manager for lowering programs for a target (`Target.lowering`)."""
    if target is None or target.lowering is None:
        return nullcontext()
    enter: Any = load(target.lowering)
    return enter(target)


class _DispatchedFunction:
    """A compiled function with packed integer arguments, called through JAX's dispatch.

    JAX's compiled functions require a packed layout for such arguments, but committed arrays never report it.
    """

    def __init__(self, compiled: Any, jitted: Callable[..., Any]):
        self._compiled, self._jitted = compiled, jitted

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


class CacheHits:
    """Counts hits in JAX's compilation cache per thread."""

    def __enter__(self) -> "CacheHits":
        self._counts = Counter[int]()
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)

    @property
    def count(self) -> int:
        """Number of cache hits of the current thread."""
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
