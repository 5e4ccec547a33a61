"""Choices that measurements decide name existing sources."""

from pkgutil import resolve_name

import attrs
import pytest

from axlearn_plugins_gpu.choices import LAYOUTS, NOT_MEASURED, PRIORITIES
from axlearn_plugins_gpu.hooks import axlearn_kernels
from axlearn_plugins_gpu.kernels import blocks
from support.paths import ROOT

TABLES = (
    "GROUPED",
    "GROUPED_MOSAIC",
    "GATED_MOSAIC",
    "GATED_MOSAIC_LATER",
    "MOSAIC",
    "MOSAIC_LATER",
    "PAGED",
    "TRITON_ATTENTION",
)
RESULTS = ROOT / "benchmarks/results"
OPS = sorted({op for op, _ in PRIORITIES})


def check_source(source):
    """Check that a source is a result in the repository, or `NOT_MEASURED`."""
    path = (ROOT / source).resolve()
    exists = source and path.is_file() and path.is_relative_to(RESULTS)
    assert source == NOT_MEASURED or exists, f"the source {source!r} is not a file under benchmarks/results"


def choices():
    """Yield (description, choice) of all priorities, layouts and block sizes."""
    yield from ((f"priority of {op} {name}", p) for (op, name), p in PRIORITIES.items())
    yield from ((f"layout from {layout.parameters[0]:g} parameters", layout) for layout in LAYOUTS)
    for table in TABLES:
        for capability, entry in getattr(blocks, table).items():
            for one in entry if isinstance(entry, tuple) else (entry,):
                yield f"blocks {table} {capability}", one


@pytest.mark.parametrize(("name", "choice"), list(choices()), ids=lambda x: x if isinstance(x, str) else "")
def test_every_choice_names_its_measurement_or_says_that_there_is_none(name, choice):
    check_source(choice.source)


@pytest.mark.parametrize("source", ["", "measured", "benchmarks/results/no-such-file.md", "README.md", "../x.md"])
def test_a_source_that_is_not_there_is_noticed(source):
    with pytest.raises(AssertionError, match="source"):
        check_source(source)


def test_a_result_is_a_source():
    check_source(f"benchmarks/results/{min(p.name for p in RESULTS.glob('*.md'))}")
    check_source(NOT_MEASURED)


def test_all_tables_of_blocks_are_looked_at():
    tables = {n for n, v in vars(blocks).items() if n.isupper() and isinstance(v, dict)} - {"CHIPS"}
    assert tables == set(TABLES)
    assert all(any(a.name == "source" for a in attrs.fields(type(choice))) for _, choice in choices())


def test_declared_kernels_have_the_priorities_of_the_table():
    declared = {(resolve_name(k.op).name, k.name): k.priority for k in axlearn_kernels()}
    assert declared == {key: p.value for key, p in PRIORITIES.items()}
