"""`axlearn targets`."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table


@click.group()
def targets() -> None:
    """List the hardware that is known."""


@targets.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """Print each kind of hardware: how a machine of it is named, its figures per device, and who says so."""
    from axlearn_core.plugins.targets import targets as known

    rows = [_row(origin, target) for _, (origin, target) in sorted(known().items())]
    if as_json:
        print_json(rows)
        return
    listing = [
        {
            "target": r["form"],
            "platform": r["platform"],
            "hbm": "-" if r["hbm_bytes"] is None else f"{r['hbm_bytes'] / 2**30:.4g} GiB",
            "peak": _peak(r["peak_flops"]),
            "distribution": r["distribution"],
            "source": r["source"] or "-",
        }
        for r in rows
    ]
    print_table(listing, ("target", "platform", "hbm", "peak", "distribution", "source"))


def _peak(peaks: dict[str, float]) -> str:
    best = peaks.get("bfloat16")
    return "-" if best is None else f"{best / 1e12:.5g} TFLOP/s"


def _row(origin: str, target: Any) -> dict[str, Any]:
    return {
        "name": target.name,
        "form": target.form,
        "examples": list(target.examples),
        "platform": target.platform,
        "devices_per_chip": target.devices_per_chip,
        "hbm_bytes": target.hbm_bytes,
        "hbm_bandwidth": target.hbm_bandwidth,
        "peak_flops": dict(target.peak_flops),
        "link_bandwidth": target.link_bandwidth,
        "network_bandwidth": target.network_bandwidth,
        "can_plan": target.topology is not None,
        "stand_in": target.stand_in,
        "source": target.source,
        "distribution": origin,
    }
