"""Jobs, and the protocol for launchers."""

import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError, nearest
from axlearn_plugins_runtime.launch.run_files import place_files


@attrs.frozen(kw_only=True)
class Job:
    """A checked training run on several hosts: the config resolves, and the hosts fit the target and the mesh.

    Attributes:
        name: Name of the job. Letters, digits and dashes, as Slurm and Kubernetes require.
        experiment: Name of an experiment, or path of a run file as given.
        document: Content of the run file, or None if `experiment` is the name of an experiment.
        bases: Contents of the run files that `document` is based on, by name.
        words: Options for `axlearn train`, as given (`--set`, `--with`, `--steps`, ...).
        run_dir: Absolute path or URI of the run directory.
        hosts: Number of machines that train.
        spares: Number of spare machines.
        processes_per_host: Trainer processes on each machine.
        config: Resolved config of the run.
        machine: Machine of the target, with the number and kind of its chips, or None if no target is set.
        environment: Additional environment variables of every trainer.
        options: Options for the launcher, an instance of its class `Options`.
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
        """Number of trainer processes of the job."""
        return self.hosts * self.processes_per_host

    def files(self, folder: str) -> dict[str, str]:
        """Return the contents of the run files, keyed by their paths in a folder on another machine, main file first.

        Returns an empty dict if the job has no run file.
        """
        return {} if self.document is None else place_files(self.experiment, self.document, self.bases, folder)

    def train_words(self, experiment: str | None = None) -> tuple[str, ...]:
        """Return the `axlearn` arguments that start training. They are identical on every host.

        Args:
            experiment: Path to which the launcher wrote the run file (default: the original path).
        """
        return "train", experiment or self.experiment, *self.words, "--run-dir", self.run_dir


@runtime_checkable
class HasOptions(Protocol):
    """A launcher with options for `--option NAME=VALUE`. See `Launcher`."""

    Options: ClassVar[type]


@runtime_checkable
class CachesCompilation(Protocol):
    """Options for a launcher that can cache compiled programs.

    Attributes:
        compile_cache: Cache compiled programs in the run directory.
    """

    compile_cache: bool


class Launcher(Protocol):
    """Starts jobs on one kind of machine. Registered by name under `axlearn.launchers` and built without arguments.

    Attributes:
        Options: Frozen attrs class of the options for `--option NAME=VALUE`. Its fields are int, float, str or bool and have
            defaults and docstrings. A field may also be None.
    """

    Options: ClassVar[type]

    def check(self) -> None:
        """Raise `RequestError` if a required package or program is missing. The error says what to install."""
        ...

    def launch(self, job: Job, *, dry_run: bool) -> int:
        """Run or submit the job.

        Args:
            job: The job. Its `options` are an instance of this launcher's `Options`.
            dry_run: Print the commands or manifests to standard output without starting anything. Must work even if the
                programs are not installed.

        Returns:
            The exit code of `axlearn launch`: 0 if the run finished or was submitted.

        Raises:
            RequestError: The job cannot be launched as requested.
            WorkError: The run failed.
        """
        ...


@attrs.frozen
class NoOptions:
    """Options class for a launcher without options."""


def parse_options(cls: type, texts: Mapping[str, str], launcher: str) -> Any:
    """Parse `--option NAME=VALUE` into an instance of a launcher's `Options`.

    Raises:
        RequestError: A name is unknown, or a value has the wrong type.
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
    except ValueError as error:  # from the validators of the class
        raise RequestError(f"--option for the launcher {launcher!r}: {error}") from error


_FLAGS = {"true": True, "false": False}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def _value(hint: Any, name: str, text: str) -> Any:
    kind = next(k for k in (bool, int, float, str) if k is hint or k in typing.get_args(hint))
    try:
        return _FLAGS[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise RequestError(f"--option {name}: got {text!r}\n    expected: {_EXPECTED[kind]}") from None
