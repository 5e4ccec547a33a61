"""What is launched, and the protocol of what launches it."""

import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError, nearest
from axlearn_plugins_runtime.launch.run_files import place_files


@attrs.frozen(kw_only=True)
class Job:
    """A training run on several hosts. It was checked: the config resolves, and the hosts fit the target and the mesh.

    Attributes:
        name: of the run; letters, digits and dashes, as names of jobs in Slurm and Kubernetes.
        experiment: the name of an experiment, or the path of a run file as it was given.
        document: the text of the run file; None for the name of an experiment.
        bases: name -> text of the run files that it begins with.
        words: the options of `axlearn train` that were given (`--set`, `--with`, `--steps`, ...).
        run_dir: absolute, or a URI.
        hosts: machines that train.
        spares: machines that wait to take the place of one of them.
        processes_per_host: trainer processes on each.
        config: of the run, resolved.
        machine: of `--target` or the run file's `target`, with the number and kind of its chips; None where none is named.
        environment: variables for every trainer, beyond those of the place where it starts.
        options: of the launcher, as its class `Options` holds them.
    """

    name: str
    experiment: str
    document: str | None = None
    bases: Mapping[str, str] = {}
    words: tuple[str, ...] = ()
    run_dir: str
    hosts: int = 1
    spares: int = 0
    processes_per_host: int = 1
    config: Any = attrs.field(default=None, repr=False)
    machine: Machine | None = None
    environment: Mapping[str, str] = {}
    options: Any = None

    @property
    def processes(self) -> int:
        """Trainer processes of the whole job."""
        return self.hosts * self.processes_per_host

    def files(self, folder: str) -> dict[str, str]:
        """Path -> text of the run's files in a folder of another machine, the run file first; empty where it has none."""
        return {} if self.document is None else place_files(self.experiment, self.document, self.bases, folder)

    def train_words(self, experiment: str | None = None) -> tuple[str, ...]:
        """The words behind `axlearn` that train: the same on every host.

        Args:
            experiment: where the launcher put the run file (`document`); the default is where it was.
        """
        return "train", experiment or self.experiment, *self.words, "--run-dir", self.run_dir


@runtime_checkable
class HasOptions(Protocol):
    """A launcher that `--option NAME=VALUE` can set something of; see `Launcher`."""

    Options: ClassVar[type]


@runtime_checkable
class CachesCompilation(Protocol):
    """Options of a launcher that say whether compiled programs are kept.

    Attributes:
        compile_cache: keep them in the run directory.
    """

    compile_cache: bool


class Launcher(Protocol):
    """Starts jobs on one kind of machines. Registered by name under `axlearn.launchers`; built without arguments.

    Attributes:
        Options: a frozen attrs class of what `--option NAME=VALUE` can set: fields of int, float, str or bool, each with a
            default and a docstring. Fields of value None are optional.
    """

    Options: ClassVar[type]

    def check(self) -> None:
        """Raises `RequestError` where a package or program is missing here, and names what to install."""
        ...

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """Runs or submits the job.

        Args:
            job: `options` is an instance of this launcher's `Options`.
            dry_run: print what would be run or submitted on standard output, start nothing, and need nothing installed.

        Returns:
            The exit code of `axlearn launch`: 0 for a run that finished or was submitted.

        Raises:
            RequestError: the job cannot be launched as it was asked for.
            WorkError: the run failed.
        """
        ...


@attrs.frozen
class NoOptions:
    """Of a launcher without options."""


def parse_options(cls: type, texts: Mapping[str, str], launcher: str) -> Any:
    """An instance of a launcher's `Options` from `--option NAME=VALUE`.

    Raises:
        RequestError: an unknown name, or a value of another type.
    """
    fields = {field.name.replace("_", "-"): field for field in attrs.fields(cls)}
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in fields:
            close = nearest(name, fields)
            names = ", ".join(fields) or "none"
            raise RequestError(
                f"--option {name}={text}: the launcher {launcher!r} has no such option\n"
                + (f"    did you mean: {', '.join(close)}?\n" if close else "")
                + f"    known: {names}"
            )
        kinds = typing.get_type_hints(cls)
        values[fields[name].name] = _value(kinds[fields[name].name], name, text)
    try:
        return cls(**values)
    except ValueError as error:  # of the class's validators
        raise RequestError(f"--option of the launcher {launcher!r}: {error}") from error


_FLAGS = {"true": True, "false": False}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def _value(hint: Any, name: str, text: str) -> Any:
    kind = next(k for k in (bool, int, float, str) if k is hint or k in typing.get_args(hint))
    try:
        return _FLAGS[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise RequestError(f"--option {name}: got {text!r}\n    expected: {_EXPECTED[kind]}") from None
