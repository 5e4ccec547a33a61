"""The compiled programs of a server as files: what they are made from, what they hold, and where they may be loaded from.

An exported program is code. It is loaded from a directory that the user names, or from `programs` in a run directory that
belongs to the user; never from a directory in Hugging Face format.
"""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from axlearn_core.compose.executables import INDEX
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, flatten
from axlearn_core.errors import RequestError
from axlearn_core.plugins.source_hash import source_hashes
from axlearn_core.plugins.unregistered import stable_repr
from axlearn_plugins_serving.runner_program import RunnerConfig, step_functions
from axlearn_plugins_serving.step_inputs import StepBucket


class ProgramsError(RequestError):
    """Exported programs that are not those of the server that is to be."""


FOLDER = "programs"
"""Of a run directory."""
FIRST = ("serve_tables", "serve_cache", "serve_weights")
"""Functions that make what steps work on."""
_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")
_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl")


def runner_functions(cfg: RunnerConfig, buckets: Sequence[StepBucket]) -> dict[str, list[StepBucket | None]]:
    """Name -> shapes, of everything that a runner computes."""
    return {**{name: [None] for name in FIRST}, **step_functions(cfg, buckets)}


def identity(program: ModelProgram, cfg: RunnerConfig, model: Node[Any]) -> dict[str, str]:
    """Everything that the programs of a runner are made from, by name: configs, mesh, options, and the code itself.

    Args:
        program: of the runner.
        cfg: of the runner.
        model: the config of the model.
    """
    parts = {f"model.{path}": stable_repr(value) for path, value in flatten(model).items()}
    parts |= {f"runner.{path}": stable_repr(value) for path, value in flatten(cfg).items()}
    parts |= {f"mesh.{path}": stable_repr(value) for path, value in flatten(program.mesh).items()}
    parts |= {f"compiler_options.{name}": str(value) for name, value in program.compiler_options.items()}
    parts["target"] = program.target.name if program.target else ""
    parts["arrays"] = _digest_arrays({**program.functional.abstract, **program.functional.variables})
    settings: Any = jax.config
    parts |= {name: str(getattr(settings, name, None)) for name in _OPTIONS}
    parts["XLA_FLAGS"] = " ".join(sorted(_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).split()))
    parts |= {f"version of {name}": importlib.metadata.version(name) for name in ("flax", "numpy")}
    return parts | {f"code of {name}": digest for name, digest in source_hashes().items()}


def _digest_arrays(arrays: Mapping[str, Any]) -> str:
    """Of paths, shapes and dtypes: adapters have ranks that no config says."""
    lines = (f"{path} {tuple(spec.shape)} {spec.dtype}\n" for path, spec in sorted(arrays.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def export_programs(
    program: ModelProgram, cfg: RunnerConfig, buckets: Sequence[StepBucket], model: Node[Any], directory: Path
) -> None:
    """Compiles what is not compiled yet, and writes all functions of a runner to a new directory.

    Raises:
        RequestError: the directory exists, or a function cannot be written.
    """
    program.export(directory, runner_functions(cfg, buckets), identity(program, cfg, model))


def check_new(directory: Path | None) -> None:
    """Raises `RequestError` where a directory exists that programs are to be written to."""
    if directory is not None and directory.exists():
        raise RequestError(f"{directory} exists\n    fix: name a new directory, or remove this one")


def load_programs(
    program: ModelProgram, cfg: RunnerConfig, buckets: Sequence[StepBucket], model: Node[Any], directory: Path
) -> None:
    """Takes the functions of a runner from a directory: nothing is traced or compiled.

    Raises:
        ProgramsError: they are of another model, other settings, other code, another version or another machine; or one is
            missing or damaged.
    """
    try:
        program.load(directory, identity(program, cfg, model))
        program.verify()
    except RequestError as error:
        raise ProgramsError(str(error)) from error
    for name, bucket in each_function(runner_functions(cfg, buckets)):
        if not program.exported(name, bucket):
            raise ProgramsError(
                f"{directory} has no program {name}" + (f" of the shape {bucket}" if bucket else "") + "\n"
                "    fix: export again"
            )


class Loading:
    """Loads functions in the background. One that is needed sooner is loaded then and there.

    Args:
        program: has them all, exported and verified.
        functions: name -> shapes.
    """

    def __init__(self, program: ModelProgram, functions: Mapping[str, Sequence[StepBucket | None]]):
        pool = ThreadPoolExecutor(1, "load-programs")
        self._loads = [pool.submit(program.compile, *function) for function in each_function(functions)]
        pool.shutdown(wait=False)

    def stop(self) -> None:
        """Leaves out what it has not begun."""
        for load in self._loads:
            load.cancel()


def each_function(functions: Mapping[str, Sequence[StepBucket | None]]) -> list[tuple[str, StepBucket | None]]:
    """(name, shape) of all shapes of functions."""
    return [(name, bucket) for name, shapes in functions.items() for bucket in shapes]


def programs_of_run(uri: str | Path) -> Path | None:
    """The exported programs in a run directory; None where there are none.

    Raises:
        RequestError: they are not the user's, or others may write them.
    """
    run = Path(uri)
    folder = run / FOLDER
    if not (run / "config.yaml").is_file() or not (folder / INDEX).is_file():
        return None
    for path in (folder, *folder.iterdir()):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise RequestError(
                f"{path} is not yours alone: programs are code, and are loaded only where nobody else can write them\n"
                f"    got: owner {status.st_uid}, mode {status.st_mode & 0o777:o}\n"
                "    fix: export them yourself, or remove them"
            )
    return folder
