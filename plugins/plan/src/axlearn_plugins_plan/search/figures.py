"""Load the coefficients of the analytic model for each platform, with their sources, from `figures.toml`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import attrs

from axlearn_core.config import get_fields
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError


@attrs.frozen(kw_only=True)
class Coefficients:
    """Coefficients that describe the compiler of a platform.

    Attributes:
        phases: Whether temporaries are estimated by the phases of a TPU step (`tpus.py`). If not, they are the sum of the saved
            activations and the columns, except on pipeline stages, where they are estimated by the phases of a GPU step
            (`stages.py`).
        memory: Column of `estimate.COLUMNS` -> bytes of temporaries per byte of the column.
        traffic_activations: Bytes of memory traffic per byte of activations that layers compute.
        traffic_weights: Bytes of memory traffic per byte of gathered parameters, for each microbatch.
        stream_gathers: All-gathers of the residual stream per layer and step if tensor parallelism shards the stream.
        stream_scatters: Reduce-scatters of the residual stream per layer and step if tensor parallelism shards the stream.
        stream_sums: All-reduces per layer and step if the residual stream is replicated.
        gathers_by_sums: Whether the compiler replaces gathers and scatters with all-reduces, which send twice as much.
        error: Relative error in the memory estimate that nine out of ten compiled layouts do not exceed.
        source: Source of the coefficients.
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
    """Return the coefficients of a target's platform.

    Raises:
        RequestError: The target does not specify its speed or memory, or its platform has no coefficients.
    """
    required = ("peak_flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")
    missing = [name for name in required if not get_fields(target)[name]]
    tables = _tables()
    if missing or target.platform not in tables:
        got = f"no {', '.join(missing)}" if missing else f"the platform {target.platform}"
        raise RequestError(
            f"the target {target.name!r} lacks the hardware figures that a search needs\n"
            f"    got: {got}\n    expected: a target for {', '.join(tables)} with a peak, memory and bandwidths\n"
            "    fix: choose another --target; `axlearn targets list` prints the figures of each"
        )
    return tables[target.platform]
