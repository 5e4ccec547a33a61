"""Compute the identity of a compiled program without tracing it: everything that the program depends on, by name.

Equal identities imply equal programs, and only this module defines them. When an export is loaded, `executables` always compares
`read_compile_settings()` (compiler flags and JAX options) with the exported values. For a run's compiled step and a server's
programs, the identity is compared too, so that these programs can be loaded without tracing.
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
from axlearn_core.config.display import exact_repr
from axlearn_core.config.flat import is_named, qualified_name
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.index import GROUP as INDEX_GROUP
from axlearn_core.plugins.registry import normalize_name

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NEURON_CC_FLAGS")
"""Environment variables that compilers read."""
_OUTPUT_FLAGS = re.compile(r"--xla_force_host_platform_device_count=\S*|--xla\w*_dump\w*(=\S*)?")
"""Flags that do not affect programs: output folders, and the number of virtual devices, which exports compare separately."""
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
        ),  # messages and folders
        *("platform", "platforms", "devices", "visible", "topology", "mock"),  # devices, which exports compare
        *("client", "host", "hosts", "transfer", "transport", "distributed"),  # communication
    }
)
"""Words in the names of JAX options that do not affect programs."""
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)""")
_NAME = re.compile(r"[\w.-]+")
_TOOLS = {"testing", "test", "tests", "dev", "docs", "plot"}
"""Extras that install tools, which programs do not call."""


def read_compile_settings() -> dict[str, str]:
    """Return the compiler flags and JAX options of this process, which affect tracing, lowering, and compiling."""
    flags = {name: _OUTPUT_FLAGS.sub("", os.environ.get(name, "")).split() for name in FLAGS}
    values: Mapping[str, Any] = jax.config.values  # includes values set by context managers of this thread
    options = {name: str(value) for name, value in values.items() if not _NO_PROGRAM & {*name.split("_")}}
    return {**{name: " ".join(sorted(words)) for name, words in flags.items()}, **dict(sorted(options.items()))}


class DescribedProgram(Protocol):
    """The attributes of a `Compiler` that an identity depends on."""

    functions: dict[str, Function]
    layout: Layout
    mesh: Mesh
    target: Target | None
    parts: dict[Part, Any]

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA options for all functions."""
        ...


def program_identity(
    program: DescribedProgram, configs: Mapping[str, Node[Any]], functions: Iterable[str]
) -> dict[str, str] | None:
    """Return everything that functions of a program depend on, by name.

    Args:
        program: Program that contains the functions. It also provides the shapes of arrays that no config defines.
        functions: Names of the functions whose donation and gradients are included. Their code is always included.
        configs: All configs that the functions read, by name.

    Returns:
        The identity. None if a config contains code or objects that only exist in this process: code outside plugins and
        installed distributions, functions that were created by other functions, or objects that cannot be compared by value.
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
    parts["AXLEARN_PLUGINS"] = os.environ.get("AXLEARN_PLUGINS", "")  # a blocked plugin does not provide kernels
    parts["python"] = platform.python_version()
    parts |= {f"version of {name}": version for name, version in dependency_versions(frozenset(packages)).items()}
    return {
        **parts,
        **read_compile_settings(),
        **{f"code of {name}": digest for name, digest in source_hashes().items()},
    }


@functools.cache
def plugin_packages() -> tuple[str, ...]:
    """Return the import names of the core and all installed plugins, excluding name indexes."""
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("axlearn.") and group != INDEX_GROUP]
    modules = {point.module.partition(".")[0] for group in groups for point in points.select(group=group)}
    return tuple(sorted({*modules, "axlearn_core"}))


def source_hashes() -> Mapping[str, str]:
    """For each package in `plugin_packages`, return 16 hex digits of the SHA-256 hash of its source and libraries."""
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
    """Return text that identifies a config value, or None if no text does."""
    if isinstance(value, functools.partial):
        text = value_text((value.func, *value.args, *value.keywords.values()))
        return text and f"partial{text} of {[*value.keywords]}"
    if isinstance(value, tuple | list):
        texts = [value_text(v) for v in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if callable(value) and is_named(value) and not isinstance(value, Node):
        # A nested function may depend on the arguments of its outer function, and a bound method on any object.
        is_plain = "<" not in qualified_name(value) and not _is_bound(value)
        return qualified_name(value) if is_plain else None
    text = exact_repr(value)
    return None if " at 0x" in text or (is_array(value) and value.ndim) else text  # repr truncates long arrays


def _is_bound(value: object) -> bool:
    """Return True if the value is a bound method. C functions, which are bound to their modules, do not count."""
    is_method = isinstance(value, MethodType | BuiltinMethodType | MethodWrapperType)
    return is_method and not isinstance(value.__self__, ModuleType | None)


@functools.cache
def dependency_versions(packages: frozenset[str] = frozenset()) -> Mapping[str, str]:
    """Return the version of each installed distribution that the core or a plugin requires, by name.

    Programs may call code in these distributions. Other distributions may differ between machines.

    Args:
        packages: Import names of additional packages whose distributions are included.
    """
    points = importlib.metadata.entry_points()
    groups = [group for group in points.groups if group.startswith("axlearn.")]
    roots = {normalize_name(p.dist.name) for group in groups for p in points.select(group=group) if p.dist}
    versions: dict[str, str] = {}
    _add_versions(versions, {*roots, "axlearn-core"}, roots)
    if more := {p for p in packages - {*plugin_packages()} if normalize_name(p) not in versions}:
        named = importlib.metadata.packages_distributions()
        _add_versions(versions, {name for package in more for name in named.get(package, ())}, roots)
    return dict(sorted(versions.items()))


def _add_versions(versions: dict[str, str], names: Iterable[str], roots: Collection[str]) -> None:
    """Add the versions of distributions and their requirements. For `roots`, also include the requirements of extras."""
    pending = [*names]
    while pending:
        name = normalize_name(pending.pop())
        if name in versions:
            continue
        try:
            metadata = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        headers = metadata.partition("\n\n")[0]  # parsing all of it as an email message would be slow
        versions[name] = next(iter(re.findall(r"^Version: (.+)$", headers, re.MULTILINE)), "")
        for text in re.findall(r"^Requires-Dist: (.+)$", headers, re.MULTILINE):
            extra = _EXTRA.search(text)  # ignore other markers, since a missing distribution has no version
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
    """Return a hash of the paths, shapes, dtypes, and shardings of abstract arrays."""
    lines = []
    for part, specs in parts.items():
        for path, spec in jax.tree_util.tree_leaves_with_path(specs):
            partition = spec.sharding.spec if isinstance(spec.sharding, NamedSharding) else None
            lines.append(f"{part.name}{jax.tree_util.keystr(path)} {spec.shape} {spec.dtype} {partition}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _is_installed(value: Any) -> bool:
    """Return True if the code of a node, class, or function has a version or a hash."""
    package = _package(value)
    if package is None or package in plugin_packages():
        return True
    module = sys.modules.get(package)
    file = (module and module.__spec__ and module.__spec__.origin) or ""
    return "site-packages" in file or "dist-packages" in file


def _package(value: Any) -> str | None:
    """Return the package that defines a node, class, or function. None for other values and the standard library."""
    if isinstance(value, Node):
        value = type(value)
    elif not callable(value):
        return None
    package = qualified_name(value).partition(":")[0].partition(".")[0]
    return None if package in sys.stdlib_module_names else package
