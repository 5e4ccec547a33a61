"""`axlearn targets`."""

from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table


@click.group()
def targets() -> None:
    """List the hardware that plugins describe."""


@targets.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List each target with its memory, peak FLOP/s and source."""
    from axlearn_core.plugins.targets import targets as known

    rows = [_row(origin, target) for _, (origin, target) in sorted(known().items())]
    if as_json:
        print_json(rows)
        return
    listing = [
        {
            "target": r["form"],
            "hbm": "-" if r["hbm_bytes"] is None else f"{r['hbm_bytes'] / 2**30:.4g} GiB",
            "peak": _peak(r["peak_flops"]),
            "summary": _summary(r),
        }
        for r in rows
    ]
    print_table(listing, ("target", "hbm", "peak", "summary"))


def _summary(row: dict[str, Any]) -> str:
    devices = f"{row['devices_per_chip']} devices per chip" if row["devices_per_chip"] > 1 else ""
    figures = f"figures: {row['source']}" if row["source"] else ""
    return "; ".join(filter(None, (row["summary"] or row["distribution"], devices, figures)))


def _peak(peaks: dict[str, float]) -> str:
    best = peaks.get("bfloat16")
    return "-" if best is None else f"{best / 1e12:.5g} TFLOP/s"


def _row(origin: str, target: Any) -> dict[str, Any]:
    return {
        "name": target.name,
        "summary": target.summary,
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
