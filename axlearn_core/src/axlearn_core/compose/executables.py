"""Export compiled functions to files, and load them in another process without compiling.

An executable is native code in a pickle, and loading it can run arbitrary code. Only load your own exports.
"""

import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
from jax.experimental import serialize_executable
from jaxlib import version as jaxlib_version

from axlearn_core.compose.devices import get_compiler_client, get_coordinates
from axlearn_core.compose.identity import read_compile_settings
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import import_kernels

FORMAT = 2
INDEX = "executables.json"


@attrs.frozen(kw_only=True)
class Executable:
    """An exported function.

    Attributes:
        function: Name of the function.
        bucket: Bucket of the function, as text.
        program: SHA-256 of its StableHLO and XLA options.
        file: Name of its file in the directory.
        sha256: Hash of the file.
        kernels: Op and name of each of its kernels. The program may call functions that the kernels' modules register.
    """

    function: str
    bucket: str
    program: str
    file: str
    sha256: str
    kernels: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=lambda pairs: tuple(map(tuple, pairs)))


def program_hash(lowered: Any, options: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the compiler's inputs."""
    text = lowered.as_text() + json.dumps({k: str(v) for k, v in options.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def environment(devices: Any) -> dict[str, Any]:
    """Return everything that an executable depends on besides its program. Described and real devices give equal results.

    Args:
        devices: Array of the mesh's devices.

    Raises:
        RequestError: If the compiler of the devices is unknown.
    """
    flat = list(devices.flat)
    if get_compiler_client(flat[0]) is None:
        raise RequestError(f"cannot export executables for {flat[0].device_kind}: the compiler is unknown")
    return {
        "format": FORMAT,
        "jax": jax.__version__,
        "jaxlib": jaxlib_version.__version__,
        "compiler": _compiler(flat[0]),
        "devices": [[d.platform, d.device_kind, d.id, get_coordinates(d)] for d in flat],
        "processes": sorted({d.process_index for d in flat}),
        "mesh": list(devices.shape),
        "cpu": _cpu_features(features=flat[0].platform == "cpu"),
        **read_compile_settings(),
    }


def _compiler(device: Any) -> str:
    if device.platform != "gpu":
        return device.client.platform_version
    # The client for real GPUs reports the driver's version, but the client for described GPUs reports the GPU kind.
    packages = ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm60-pjrt", "jax-rocm7-pjrt")
    return ", ".join(f"{p} {v}" for p in packages if (v := _version(p))) or device.client.platform_version


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(
    directory: str | os.PathLike[str],
    devices: object,
    functions: Mapping[tuple[str, str], tuple[Any, str, Sequence[tuple[str, str]]]],
    identity: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write compiled functions atomically to a new directory that only this user can write to.

    In a job with several processes, one process writes the executables for all processes.

    Args:
        directory: New directory.
        devices: See `environment`.
        functions: The compiled function, its `program_hash`, and its `Executable.kernels`, by function and bucket.
        identity: Everything that determines the programs, by name; see `Compiler.load`.
        facts: JSON-serializable data for `read_facts`.

    Raises:
        RequestError: If the directory exists, or if the compiler of the devices is unknown.
    """
    target, around = Path(directory), environment(devices)
    if target.exists():
        raise RequestError(f"{target} already exists\n    fix: use a new directory, or remove this one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        folder = Path(scratch) / "executables"
        folder.mkdir()
        folder.chmod(0o755)
        entries = []
        for number, ((name, bucket), (compiled, program, kernels)) in enumerate(functions.items()):
            content = pickle.dumps(serialize_executable.serialize(compiled))
            file = f"{name}-{number}.executable"
            (folder / file).write_bytes(content)
            (folder / file).chmod(0o644)
            sha = hashlib.sha256(content).hexdigest()
            parts = {"program": program, "file": file, "sha256": sha, "kernels": kernels}
            entries.append(Executable(function=name, bucket=bucket, **parts))
        index = {**around, "identity": dict(identity or {}), "facts": dict(facts or {})}
        index["functions"] = [attrs.asdict(e) for e in entries]
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / INDEX).chmod(0o644)
        folder.rename(target)


def read_index(
    directory: str | os.PathLike[str], devices: object, identity: Mapping[str, str] | None = None
) -> dict[tuple[str, str], Executable]:
    """Read the index of an export: its executables by function and bucket. This does not load code.

    Raises:
        RequestError: If the directory is not an export, or if the version of JAX, the compiler, the machine, the mesh, or the
            given identity differs.
    """
    path = Path(directory) / INDEX
    try:
        index = json.loads(path.read_text())
        entries = [Executable(**e) for e in index["functions"]]
    except FileNotFoundError:
        raise RequestError(f"{directory} is not an export: it has no {INDEX}") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise RequestError(f"{path} is damaged: {error}\n    fix: export again") from error
    for name, expected in environment(devices).items():
        if index.get(name) != expected:
            raise RequestError(
                f"{directory} was exported with a different {_NAMES.get(name, f'value of {name}')}\n"
                f"    got: {_short(index.get(name))}\n"
                f"    expected: {_short(expected)}\n"
                "    fix: export again on this machine"
            )
    if identity is not None:
        _check_identity(directory, index.get("identity") or {}, identity)
    return {(e.function, e.bucket): e for e in entries}


def read_facts(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the facts stored in an export."""
    return dict(json.loads((Path(directory) / INDEX).read_text()).get("facts") or {})


def _check_identity(
    directory: str | os.PathLike[str], exported: Mapping[str, str], identity: Mapping[str, str]
) -> None:
    names = [name for name in {**identity, **exported} if exported.get(name) != identity.get(name)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RequestError(
            f"{directory} was exported with a different identity: {names[0]}{more}\n"
            f"    got: {_short(exported.get(names[0]))}\n    expected: {_short(identity.get(names[0]))}\n"
            "    fix: export again, or use the settings and the code of the export"
        )


def read(directory: str | os.PathLike[str], entry: Executable) -> bytes:
    """Return the contents of an executable's file.

    Raises:
        RequestError: If the file is missing or damaged.
    """
    path = Path(directory) / entry.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error}\n    fix: export again") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise RequestError(f"{path} is damaged: its hash does not match {INDEX}\n    fix: export again")
    return content


def load(directory: str | os.PathLike[str], entry: Executable, program: str | None, devices: Any) -> Any:
    """Load a compiled function after verifying its program and its file.

    Args:
        directory: Directory of the export.
        entry: Entry in its index.
        program: The current `program_hash` of the function. None if the identity was compared instead.
        devices: Array of the mesh's devices.

    Raises:
        RequestError: If the program changed, if the file is damaged, or if one of its kernels is not installed.
    """
    path = Path(directory) / entry.file
    if program is not None and entry.program != program:
        raise RequestError(
            f"{path}: the program of {entry.function} changed\n"
            f"    got: {entry.program[:16]}\n    expected: {program[:16]}\n"
            "    fix: export again, or use the config and the code of the export"
        )
    flat = list(devices.flat)
    import_kernels(entry.kernels)
    arguments = pickle.loads(read(directory, entry))
    return serialize_executable.deserialize_and_load(*arguments, backend=flat[0].client, execution_devices=flat)


_NAMES = {
    "format": "version of the export format",
    "compiler": "compiler",
    "mesh": "mesh",
    "jax": "version of JAX",
    "jaxlib": "version of jaxlib",
    "devices": "machine",
    "processes": "number of processes",
    "cpu": "kind of CPU",
}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _cpu_features(features: bool) -> str:
    """Return the host's architecture and, if `features`, a hash of the instruction sets that XLA for CPU targets."""
    if not features:
        return platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]
    return f"{platform.machine()} {digest}"
