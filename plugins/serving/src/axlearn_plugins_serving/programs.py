"""The compiled programs of a server as files: what they are made from, what they hold, and where they may be loaded from.

An exported program is code. It is loaded from a directory that the user names, or from `programs` in a run directory that
belongs to the user; never from a directory in Hugging Face format.
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
    """Exported programs that are not those of the server that is to be."""


FOLDER = "programs"
"""Of a run directory."""
Shapes: TypeAlias = Mapping[str, Sequence[StepBucket | None]]
"""Function -> the shapes that it is compiled for."""


def identity(program: ModelProgram, configs: Mapping[str, Node[Any]]) -> dict[str, str]:
    """Everything that the programs of a runner are made from, by name.

    Args:
        program: of the runner.
        configs: of the runner and of its model.

    Raises:
        ProgramsError: a config has code that only this process knows.
    """
    # A program that is to be loaded has not declared the functions of steps: their code and the configs stand for them.
    parts = program_identity(program, configs, functions=())
    if parts is None:
        raise ProgramsError(
            "nothing tells the programs of this model from those of another: its config has code that is not installed\n"
            "    fix: install the code as a package, or serve without exported programs"
        )
    return parts


def check_new(directory: Path | None) -> None:
    """Raises `RequestError` where a directory exists that programs are to be written to."""
    if directory is not None and directory.exists():
        raise RequestError(f"{directory} exists\n    fix: name a new directory, or remove this one")


def load_programs(program: ModelProgram, functions: Shapes, configs: Mapping[str, Node[Any]], directory: Path) -> None:
    """Takes functions of a runner from a directory: nothing is traced or compiled.

    Raises:
        ProgramsError: they are of another model, other settings, other code, another version or another machine; or one is
            missing or damaged.
    """
    try:
        program.load(directory, identity(program, configs))
        program.verify()
    except RequestError as error:
        raise ProgramsError(str(error)) from error
    for name, bucket in each_function(functions):
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

    def __init__(self, program: ModelProgram, functions: Shapes):
        pool = ThreadPoolExecutor(1, "load-programs")
        self._loads = [pool.submit(program.compile, *function) for function in each_function(functions)]
        pool.shutdown(wait=False)

    def stop(self) -> None:
        """Leaves out what it has not begun."""
        for load in self._loads:
            load.cancel()


def each_function(functions: Shapes) -> list[tuple[str, StepBucket | None]]:
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
