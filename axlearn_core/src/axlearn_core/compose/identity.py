"""What a compiled program depends on, by name, without tracing it: equal identities are equal programs.

This is the only place that decides it. `executables` compares the circumstances of every export; the compiled step of a run and
the programs of a server also compare the identity, and are then loaded without being traced.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from axlearn_core.compose.functions import Function, Part
from axlearn_core.compose.layout import Layout
from axlearn_core.config import Node, flatten, walk
from axlearn_core.config.flat import is_named, qualified_name
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.index import GROUP as INDEX_GROUP
from axlearn_core.plugins.registry import normalized

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NEURON_CC_FLAGS")
"""Variables that compilers read."""
_OUTPUT_FLAGS = re.compile(r"--xla_force_host_platform_device_count=\S*|--xla\w*_dump\w*(=\S*)?")
"""Flags that set the number of virtual devices, which exports compare by themselves, or where to write."""
_NO_PROGRAM = frozenset(
    {
        *(
            "cache",
            "log",
            "logging",
            "traceback",
            "tracebacks",
            "dump",
            "dumps",
            "garbage",
            "pprint",
        ),  # messages and places
        *("platform", "platforms", "devices", "visible", "topology", "mock"),  # the devices, which exports compare
        *("client", "host", "hosts", "transfer", "transport", "distributed"),  # how processes and devices talk
    }
)
"""Options of JAX with one of these words in their names do not change a program."""
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)""")
_NAME = re.compile(r"[\w.-]+")
_TOOLS = {"testing", "test", "tests", "dev", "docs", "plot"}
"""Extras that bring tools; no program calls them."""


def circumstances() -> dict[str, str]:
    """The compilers' flags and JAX's options in this process: tracing, lowering and compiling read them."""
    flags = {name: _OUTPUT_FLAGS.sub("", os.environ.get(name, "")).split() for name in FLAGS}
    values: Mapping[str, Any] = jax.config.values  # with what context managers of this thread set
    options = {name: str(value) for name, value in values.items() if not _NO_PROGRAM & {*name.split("_")}}
    return {**{name: " ".join(sorted(words)) for name, words in flags.items()}, **dict(sorted(options.items()))}


class DescribedProgram(Protocol):
    """What an identity reads of a `Compiler`; see its attributes."""

    functions: dict[str, Function]
    layout: Layout
    mesh: Mesh
    target: Target | None
    parts: dict[Part, Any]

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for all functions."""
        ...


def program_identity(
    program: DescribedProgram, configs: Mapping[str, Node[Any]], functions: Iterable[str]
) -> dict[str, str] | None:
    """Everything that some functions of a program are made from, by name.

    Args:
        program: has the functions; of arrays whose shapes no config gives, it has the shapes.
        functions: the names of those whose donation and gradients count besides their code, which always counts.
        configs: name -> config, of all that the functions read.

    Returns:
        None if a config has code or objects that only this process knows: code that is neither of a plugin nor of an installed
        distribution, functions that were made by other functions, or objects without a value.
    """
    parts, packages = {}, set()
    for name, config in configs.items():
        if any(not _is_installed(value) for _, value in walk(config)):
            return None
        packages |= {package for _, value in walk(config) if (package := _package(value))}
        for path, value in flatten(config).items():
            if (text := value_text(value)) is None:
                return None
            parts[f"{name}.{path}"] = text
    parts |= {f"mesh.{axis}": str(size) for axis, size in program.layout.mesh.shape.items()}
    parts |= {f"mesh config.{path}": str(value) for path, value in flatten(program.mesh).items()}
    parts |= {f"compiler_options.{name}": str(value) for name, value in program.compiler_options.items()}
    parts |= {f"function {name}": _describe_function(program.functions[name]) for name in functions}
    parts["arrays"] = _digest_arrays(program.parts)
    parts["target"] = program.target.name if program.target else ""
    parts["processes"] = str(len({device.process_index for device in program.layout.mesh.devices.flat}))
    parts["AXLEARN_PLUGINS"] = os.environ.get("AXLEARN_PLUGINS", "")  # a plugin that is blocked gives no kernels
    parts["python"] = platform.python_version()
    parts |= {f"version of {name}": version for name, version in dependency_versions(frozenset(packages)).items()}
    return {**parts, **circumstances(), **{f"code of {name}": digest for name, digest in source_hashes().items()}}


@functools.cache
def plugin_packages() -> tuple[str, ...]:
    """The import names of the core and of every installed plugin; an index of names is data, not a plugin."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("axlearn.") and group != INDEX_GROUP]
    modules = {point.module.partition(".")[0] for group in groups for point in points.select(group=group)}
    return tuple(sorted({*modules, "axlearn_core"}))


def source_hashes() -> Mapping[str, str]:
    """Package -> 16 hex digits of SHA-256 of its source and its compiled libraries, for each of `plugin_packages`."""
    return {name: _hash_package(name) for name in plugin_packages()}


def _hash_package(package: str) -> str:
    spec = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for folder in sorted((spec.submodule_search_locations or ()) if spec else ()):
        files = [path for pattern in ("*.py", "*.so") for path in Path(folder).rglob(pattern)]
        for path in sorted(files):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def value_text(value: object) -> str | None:
    """A value of a config as text that tells it from others; None if no text does."""
    if isinstance(value, functools.partial):
        text = value_text((value.func, *value.args, *value.keywords.values()))
        return text and f"partial{text} of {[*value.keywords]}"
    if isinstance(value, tuple | list):
        texts = [value_text(v) for v in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if callable(value) and is_named(value) and not isinstance(value, Node):
        # Code that a function made may compute with what that function was given. A method's object may hold anything.
        is_plain = "<" not in qualified_name(value) and not _is_bound(value)
        return qualified_name(value) if is_plain else None
    text = repr(value)
    return (
        None if " at 0x" in text or (is_array(value) and value.ndim) else text
    )  # long arrays are not printed as a whole


def _is_bound(value: object) -> bool:
    """Whether a callable is a method of an object; functions in C are bound to their modules."""
    is_method = isinstance(value, MethodType | BuiltinMethodType | MethodWrapperType)
    return is_method and not isinstance(value.__self__, ModuleType | None)


@functools.cache
def dependency_versions(packages: frozenset[str] = frozenset()) -> Mapping[str, str]:
    """Name -> version of each installed distribution that the core or a plugin requires, directly or not.

    Programs are traced through them. Other distributions may differ from machine to machine.

    Args:
        packages: import names of further packages, whose distributions count too.
    """
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("axlearn.")]
    roots = {normalized(p.dist.name) for group in groups for p in points.select(group=group) if p.dist}
    versions: dict[str, str] = {}
    _add_versions(versions, {*roots, "axlearn-core"}, roots)
    if more := {p for p in packages - {*plugin_packages()} if normalized(p) not in versions}:
        named = importlib.metadata.packages_distributions()
        _add_versions(versions, {name for package in more for name in named.get(package, ())}, roots)
    return dict(sorted(versions.items()))


def _add_versions(versions: dict[str, str], names: Iterable[str], roots: Collection[str]) -> None:
    """Adds the versions of distributions, and of those that they require; of `roots`, also what their extras bring."""
    pending = [*names]
    while pending:
        name = normalized(pending.pop())
        if name in versions:
            continue
        try:
            metadata = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        headers = metadata.partition("\n\n")[0]  # not parsed as a message, which would take most of the time
        versions[name] = next(iter(re.findall(r"^Version: (.+)$", headers, re.MULTILINE)), "")
        for text in re.findall(r"^Requires-Dist: (.+)$", headers, re.MULTILINE):
            extra = _EXTRA.search(text)  # other markers do not matter: what is not installed has no version
            if extra is None or (name in roots and extra[1] not in _TOOLS):
                pending += _NAME.findall(text)[:1]


def _describe_function(function: Any) -> str:
    call = function.call
    while isinstance(call, functools.partial):
        call = call.func
    name = qualified_name(call)
    required = sorted(function.required_kernels or ())
    return f"{name} donate={function.donate} differentiates={function.differentiates} required={required}"


def _digest_arrays(parts: Mapping[Any, Any]) -> str:
    """Paths, shapes, dtypes and shardings of the abstract arrays."""
    lines = []
    for part, specs in parts.items():
        for path, spec in jax.tree_util.tree_leaves_with_path(specs):
            where = spec.sharding.spec if isinstance(spec.sharding, NamedSharding) else None
            lines.append(f"{part.name}{jax.tree_util.keystr(path)} {spec.shape} {spec.dtype} {where}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _is_installed(value: Any) -> bool:
    """Whether the code of a node, class or function has a version or a hash."""
    package = _package(value)
    if package is None or package in plugin_packages():
        return True
    module = sys.modules.get(package)
    file = (module and module.__spec__ and module.__spec__.origin) or ""
    return "site-packages" in file or "dist-packages" in file


def _package(value: Any) -> str | None:
    """The package with the code of a node, class or function; None for other values and for Python's own."""
    if isinstance(value, Node):
        value = type(value)
    elif not callable(value):
        return None
    package = qualified_name(value).partition(":")[0].partition(".")[0]
    return None if package in sys.stdlib_module_names else package
