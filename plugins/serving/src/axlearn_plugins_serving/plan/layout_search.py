"""A search over the layouts of a server.

Layouts differ in replicas, tensor parallelism, concurrent requests, and cache dtype.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from axlearn_core.compose.devices import configure_devices
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request, Setting
from axlearn_plugins_serving.plan.plan_request import plan_server
from axlearn_plugins_serving.settings import PREFIX, engine_config

ROWS = (4, 8, 16, 32, 64, 128, 256, 512)
CACHE_DTYPES = ("int8", "float8_e4m3fn")
VARIED = ("cache-dtype",)


@attrs.frozen(kw_only=True)
class ServingLayout:
    """A layout of a server on a machine.

    Attributes:
        replicas: Number of servers, each with the whole model.
        machine: Part of the machine that a replica runs on. All its devices split each matrix multiplication.
        rows: Maximum number of running requests per replica.
        cache_dtype: Storage dtype of keys and values; None uses the model's dtype.
        shipped: Whether this is the layout that the server uses without a search.
    """

    replicas: int
    machine: Machine
    rows: int
    cache_dtype: str | None
    shipped: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the layout, for `--set`."""
        values: dict[str, Any] = {"serving.runner.max_rows": self.rows}
        return values if self.cache_dtype is None else {**values, "serving.runner.cache_dtype": self.cache_dtype}

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of `axlearn plan EXPERIMENT --serve` for one replica."""
        set_ = (w for path, value in self.settings.items() for w in ("--set", f"{path}={value}"))
        return ("--target", self.machine.name, *set_)


@attrs.frozen(kw_only=True)
class ServingRow:
    """A compiled layout.

    Attributes:
        tpot: Seconds between the tokens of a request while all rows decode, at the roofline.
        tokens_per_second: Output tokens per second across all replicas, while no prompts are prefilled.
        bytes: Memory per device, in bytes.
    """

    layout: ServingLayout
    tpot: float
    tokens_per_second: float
    bytes: float
    fits: bool


@attrs.frozen(kw_only=True)
class ServingResult:
    """The result of a search.

    It contains the layouts that fit, sorted by descending tokens/s, and always includes the shipped layout.

    Attributes:
        front: The Pareto front of `rows` in time per token and tokens/s.
        failures: (arguments of a layout, reason why it could not be planned) pairs.
        ended: Reason why the search ended.
    """

    rows: tuple[ServingRow, ...]
    front: tuple[ServingRow, ...]
    failures: tuple[tuple[str, str], ...]
    ended: str


def list_layouts(
    machine: Machine, max_rows: int, cache_dtype: str | None, vary: Sequence[str]
) -> list[list[ServingLayout]]:
    """Return chains of layouts, each with increasing numbers of requests and increasing memory.

    The first chain contains only the shipped layout.
    """
    dtypes = list(dict.fromkeys((cache_dtype, *(CACHE_DTYPES if "cache-dtype" in vary else ()))))
    shipped = ServingLayout(replicas=1, machine=machine, rows=max_rows, cache_dtype=cache_dtype, shipped=True)
    chains = [[shipped]]
    for size in (2**n for n in itertools.count()):
        if size > machine.devices_per_domain:
            break
        part = machine.target.make_machine(size)
        if part is None or machine.devices % size:
            continue
        for dtype in dtypes:
            chain = [
                ServingLayout(replicas=machine.devices // size, machine=part, rows=rows, cache_dtype=dtype)
                for rows in ROWS
            ]
            chains.append([c for c in chain if not _equals(c, shipped)])
    return chains


def _equals(one: ServingLayout, other: ServingLayout) -> bool:
    return attrs.evolve(one, shipped=other.shipped) == other


def search_serving(
    request: Request,
    machine: Machine,
    vary: Sequence[str],
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> ServingResult:
    """Compile a server's steps on every part of a machine.

    The search ends when its time is up.

    For each replica size, the search doubles the number of requests as long as they fit.

    Args:
        request: Request to plan. Its settings under `serving.` are for the engine.
        machine: The whole machine.
        vary: Properties to vary that change the results, such as `cache-dtype`.
        seconds: Time limit for compiling.
        progress: Called with a line for each compiled layout.

    Raises:
        RequestError: If the target has no known performance numbers, or if the shipped layout cannot be planned.
    """
    if not machine.target.peak_flops or machine.target.hbm_bytes is None:
        raise RequestError(
            f"the target {machine.name} lacks the hardware figures needed to rank layouts\n"
            "    fix: name a target for which `axlearn targets list` shows a peak"
        )
    configure_devices(machine)
    engine = tuple(s for s in request.settings if s.path.startswith(PREFIX))
    other_settings = tuple(s for s in request.settings if s not in engine)
    runner: Any = engine_config(engine).runner
    started, slowest = time.monotonic(), 0.0
    rows: list[ServingRow] = []
    failures: list[tuple[str, str]] = []
    ended = "requests were doubled until they no longer fit"
    for chain in list_layouts(machine, runner.max_rows, runner.cache_dtype, vary):
        for layout in chain:
            if rows and seconds - (time.monotonic() - started) < slowest:
                ended = "the budget was used up"
                break
            layout_started = time.monotonic()
            row = _plan_layout(attrs.evolve(request, settings=other_settings), engine, layout, failures)
            slowest = max(slowest, time.monotonic() - layout_started)
            if row is None:
                break
            rows.append(row)
            progress(f"{' '.join(layout.words)} x {layout.replicas}: {_figures(row)}")
            if not row.fits:
                break
    return _result(rows, failures, ended)


def _plan_layout(
    request: Request, engine: Sequence[Setting], layout: ServingLayout, failures: list[tuple[str, str]]
) -> ServingRow | None:
    layout_settings = [Setting(path=p, value=v) for p, v in layout.settings.items()]
    settings = [s for s in engine if s.path not in layout.settings]
    try:
        plan = plan_server(
            attrs.evolve(request, target=layout.machine.name), engine_config([*settings, *layout_settings])
        )
    except RequestError as error:  # the number of heads may not be divisible by the number of devices
        if layout.shipped:
            raise
        failures.append((" ".join(layout.words), str(error).splitlines()[0]))
        return None
    step = plan.full.roofline.step
    if step is None:
        raise RequestError(f"the target {layout.machine.name} lacks the hardware figures needed to rank layouts")
    tokens = layout.replicas * plan.full.requests / step
    return ServingRow(layout=layout, tpot=step, tokens_per_second=tokens, bytes=plan.total, fits=plan.fits)


def _result(rows: Sequence[ServingRow], failures: Sequence[tuple[str, str]], ended: str) -> ServingResult:
    candidates = [r for r in rows if r.fits or r.layout.shipped]
    candidates.sort(key=lambda r: (not r.fits, -r.tokens_per_second, r.tpot))
    front: list[ServingRow] = []
    for row in candidates:
        if row.fits and (not front or row.tpot < front[-1].tpot):
            front.append(row)
    return ServingResult(rows=tuple(candidates), front=tuple(front), failures=tuple(failures), ended=ended)


def _figures(row: ServingRow) -> str:
    verdict = "" if row.fits else ", does not fit"
    return f"{row.tokens_per_second:,.0f} tokens/s, {1e3 * row.tpot:.3g} ms a token{verdict}"


def text(request: Request, machine: Machine, result: ServingResult) -> str:
    """Format a result as text."""
    lines = [
        f"serving {request.experiment} on {machine.name}: {len(result.rows)} layouts compiled, at the roofline",
        "  replicas  tensor  requests  cache          tokens/s  ms/token  GiB/device",
    ]
    for row in result.rows:
        layout = row.layout
        mark = "*" if row in result.front else " "
        note = ("  shipped" if layout.shipped else "") + ("" if row.fits else "  does not fit")
        lines.append(
            f"{mark} {layout.replicas:>8}  {layout.machine.devices:>6}  {layout.rows:>8}  {layout.cache_dtype or 'as the model':13}"
            f"  {row.tokens_per_second:>8,.0f}  {1e3 * row.tpot:>8.3g}  {row.bytes / 2**30:>10.3g}{note}"
        )
    lines += [f"not planned: {words}: {why}" for words, why in result.failures]
    lines.append(f"* no other layout has more tokens/s and less time per token; {result.ended}")
    if result.rows and result.rows[0].fits:
        best = " ".join(["axlearn plan", str(request.experiment), "--serve", *result.rows[0].layout.words])
        lines.append(f"to plan one replica of the first: {best}")
    return "\n".join(lines)


def as_json(machine: Machine, result: ServingResult) -> dict[str, Any]:
    """Return a result as a JSON object. Bytes are per device."""
    return {
        "target": machine.name,
        "layouts": [
            {
                "replicas": row.layout.replicas,
                "replica_target": row.layout.machine.name,
                "tensor": row.layout.machine.devices,
                "set": row.layout.settings,
                "tokens_per_second": row.tokens_per_second,
                "tpot_seconds": row.tpot,
                "bytes": row.bytes,
                "fits": row.fits,
                "compiled": True,
                "front": row in result.front,
                "shipped": row.layout.shipped,
            }
            for row in result.rows
        ],
        "failures": [{"layout": words, "error": why} for words, why in result.failures],
        "ended": result.ended,
    }


def dumps(machine: Machine, result: ServingResult) -> str:
    """Return the JSON object as text."""
    return json.dumps(as_json(machine, result), indent=2)
