"""The parts of the benchmark, their jobs, and their shares of time. Only imports the standard library."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: Unique name among all jobs.
        function: `module:function` of this package. The function receives a `Context`.
        options: More arguments of the function.
        weight: Share of the part's time.
    """

    name: str
    function: str
    options: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Part:
    """A section of the report.

    Attributes:
        name: Name for `--only`.
        title: Heading in the report.
        weight: Share of the time that is left when the part starts.
        jobs: Jobs, which run one after another.
    """

    name: str
    title: str
    weight: float
    jobs: tuple[Job, ...]


PARTS = (
    Part(
        "kernels",
        "Kernels against the references, and their tests",
        1.8,
        (Job("kernels", "kernels:measure", weight=2.5), Job("kernel-tests", "kernel_tests:measure")),
    ),
    Part(
        "peaks",
        "Measured peaks, and attention as a share of them",
        1.8,
        (Job("peaks", "peaks:measure"), Job("attention", "attention:measure", weight=2.0)),
    ),
    Part(
        "steps",
        "Training steps",
        4.5,
        (
            Job("1b", "steps:measure", ("1b",), 1.4),
            Job("pytorch-1b", "pytorch:measure", ("1b",), 1.4),
            Job("variants-1b", "steps:measure_variants", ("1b",), 2.5),
            Job("3b", "steps:measure", ("3b",)),
            Job("pytorch-3b", "pytorch:measure", ("3b",)),
            Job("7b-layers", "steps:measure", ("7b-layers",)),
            Job("pytorch-7b-layers", "pytorch:measure", ("7b-layers",)),
        ),
    ),
    Part("plan", "The plan against the machine", 1.2, (Job("plan", "plans:measure", ("1b",)),)),
    Part("decode", "Decoding", 1.0, (Job("decode", "decode:measure"),)),
    Part("checkpoint", "Checkpoints", 0.8, (Job("checkpoint", "checkpoint:measure"),)),
)
"""Ordered by importance, because the last parts may not run if time is short."""
