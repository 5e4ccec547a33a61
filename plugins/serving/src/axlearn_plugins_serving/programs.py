"""Load a server's compiled programs from files.

An exported program is code. Programs are loaded only from a directory that the user names, or from `programs` in a run
directory that belongs to the user; never from a directory in Hugging Face format.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from axlearn_core.compose.executables import INDEX
from axlearn_core.compose.identity import program_identity
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.step_inputs import StepBucket


class ProgramsError(RequestError):
    """Raised if exported programs do not match the server."""


FOLDER = "programs"
"""Folder of exported programs in a run directory."""
Shapes: TypeAlias = Mapping[str, Sequence[StepBucket | None]]
"""Function -> shapes that it is compiled for."""


def identity(program: ModelProgram, configs: Mapping[str, Node[Any]]) -> dict[str, str]:
    """Return everything that determines a runner's programs, by name.

    Args:
        program: Program of the runner.
        configs: Configs of the runner and of its model.

    Raises:
        ProgramsError: If a config has code that is not installed.
    """
    # Steps are not declared yet when programs are loaded, so the configs and their code identify the steps.
    parts = program_identity(program, configs, functions=())
    if parts is None:
        raise ProgramsError(
            "the programs of this model cannot be identified, because its config has code that is not installed\n"
            "    fix: install the code as a package, or serve without exported programs"
        )
    return parts


def check_absent(directory: Path | None) -> None:
    """Raise `RequestError` if the directory for the programs already exists."""
    if directory is not None and directory.exists():
        raise RequestError(f"{directory} exists\n    fix: name a new directory, or remove this one")


def load_programs(program: ModelProgram, functions: Shapes, configs: Mapping[str, Node[Any]], directory: Path) -> None:
    """Load a runner's functions from a directory without tracing or compiling.

    Raises:
        ProgramsError: If the programs are for a different model, machine or version, for different settings or code, or if one
            is missing or damaged.
    """
    try:
        program.load(directory, identity(program, configs))
        program.verify()
    except RequestError as error:
        raise ProgramsError(str(error)) from error
    for name, bucket in list_functions(functions):
        if not program.exported(name, bucket):
            raise ProgramsError(
                f"{directory} has no program {name}" + (f" of the shape {bucket}" if bucket else "") + "\n"
                "    fix: export again"
            )


class BackgroundLoader:
    """Loads functions in the background.

    A function that is needed before its turn is loaded immediately.

    Args:
        program: Program whose functions have all been exported and verified.
        functions: Name -> shapes.
    """

    def __init__(self, program: ModelProgram, functions: Shapes):
        pool = ThreadPoolExecutor(1, "load-programs")
        self._loads = [pool.submit(program.compile, *function) for function in list_functions(functions)]
        pool.shutdown(wait=False)

    def stop(self) -> None:
        """Cancel the loads that have not started."""
        for load in self._loads:
            load.cancel()


def list_functions(functions: Shapes) -> list[tuple[str, StepBucket | None]]:
    """Return (name, shape) for all shapes of all functions."""
    return [(name, bucket) for name, shapes in functions.items() for bucket in shapes]


def find_run_programs(uri: str | Path) -> Path | None:
    """Return the exported programs in a run directory, or None.

    Raises:
        RequestError: If other users own the programs or can write to them.
    """
    run = Path(uri)
    folder = run / FOLDER
    if not (run / "config.yaml").is_file() or not (folder / INDEX).is_file():
        return None
    for path in (folder, *folder.iterdir()):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise RequestError(
                f"{path} is not safe to load: programs are code, so other users must not be able to write them\n"
                f"    got: owner {status.st_uid}, mode {status.st_mode & 0o777:o}\n"
                "    fix: export them yourself, or remove them"
            )
    return folder
