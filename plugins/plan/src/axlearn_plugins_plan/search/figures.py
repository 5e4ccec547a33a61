"""Coefficients of the analytic model by platform: data in `figures.toml`, with where they come from."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import attrs

from axlearn_core.config import fields_of
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError


@attrs.frozen(kw_only=True)
class Coefficients:
    """What formulas cannot know of a platform's compiler.

    Attributes:
        phases: whether temporaries are those of a TPU's phases (`tpus.py`). Else they are what waits for the backward pass
            and columns, and on stages those of a GPU's phases (`stages.py`).
        memory: column of `estimate.COLUMNS` -> bytes of temporaries for each of its bytes.
        traffic_activations: bytes to and from memory for a byte that layers compute.
        traffic_weights: the same for a byte of gathered parameters, for each microbatch.
        stream_gathers: all-gathers of the residual stream in each layer of a step where tensor parallelism splits it.
        stream_scatters: reduce-scatters, likewise.
        stream_sums: all-reduces in each layer of a step where every device holds it whole.
        gathers_by_sums: whether the compiler writes gathers and scatters as sums, which send twice as much.
        error: the relative error of the memory, that nine of ten compiled layouts keep.
        source: where they come from.
    """

    phases: bool = False
    memory: Mapping[str, float] = {}
    traffic_activations: float = 0.0
    traffic_weights: float = 0.0
    stream_gathers: float = 0.0
    stream_scatters: float = 0.0
    stream_sums: float = 0.0
    gathers_by_sums: bool = False
    error: float
    source: str


@cache
def _tables() -> Mapping[str, Coefficients]:
    text = files("axlearn_plugins_plan.search").joinpath("figures.toml").read_text("utf-8")
    return {name: Coefficients(**table) for name, table in tomllib.loads(text).items()}


def coefficients(target: Target) -> Coefficients:
    """Those of a target's platform.

    Raises:
        RequestError: the target has no figures for its speed or memory, or its platform has no coefficients.
    """
    needed = ("peak_flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")
    lacks = [name for name in needed if not fields_of(target)[name]]
    tables = _tables()
    if lacks or target.platform not in tables:
        got = f"no {', '.join(lacks)}" if lacks else f"the platform {target.platform}"
        raise RequestError(
            f"a search needs figures of the hardware, and the target {target.name!r} has none that suffice\n"
            f"    got: {got}\n    expected: a target of {', '.join(tables)} with its peak, memory and bandwidths\n"
            "    fix: take another --target; `axlearn targets list` prints the figures of each"
        )
    return tables[target.platform]
