"""What our plans say of the published trainings, beside what was published: time of a step, MFU, memory.

    uv run python benchmarks/plan_table.py [--only TEXT] [--between] [--json FILE]

Each row is `axlearn plan ... --json` in a process of its own, those for GPUs and Trainium two at a time, which makes each of these
slower to compile; nothing runs on the hardware. The published figures are those of AXLearn (arXiv 2507.05411) and of what it
compares with; global batch 1024 and sequence 4096 unless a row says otherwise.
The roofline is the least time that the hardware allows (docs/plan.md): a published time below it means that a figure of one
or the other is wrong. MFU counts full attention, as published, and causal attention beside it. The weak-scaling rows keep the
rows per chip of the base; the 150B model's sizes, batch and mesh are ours, since none are published. Of the two curves of weak
scaling the ends are planned, which have published figures; `--between` plans the sizes between them too.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A published training: seconds of a step and MFU, where they are known, by system."""

    model: str
    target: str
    extra: tuple[str, ...] = ()
    published: tuple[tuple[str, float | None, float | None], ...] = ()
    note: str = ""


def settings(**values):
    return tuple(w for k, v in values.items() for w in ("--set", f"{k.replace('__', '.')}={v}"))


def scaled(chips: int, mfu: float | None) -> Row:
    """70B with two rows of 4096 tokens on each chip, in one slice. With 512 chips it is the row of the table above."""
    published = (("AXLearn", None, mfu),) if mfu else ()
    return Row("llama2-70b", f"tpu-v5p-{2 * chips}", settings(input__batch_size=2 * chips), published, "weak scaling")


def dense_150b(slices: int, mfu: float | None) -> Row:
    """150B at 8192, a row for each four chips: tensor parallelism over 4, FSDP over 512, data parallelism over the rest."""
    model = {"hidden_dim": 12288, "layer.attention.num_heads": 96, "layer.feed_forward.hidden_dim": 41984}
    extra = [w for k, v in model.items() for w in ("--set", f"model.decoder.{k}={v}")]
    extra += settings(input__sequence_length=8192, input__batch_size=2048 * slices)
    extra += ["--set", "mesh.shape={data: -1, fsdp: 512, tensor: 4}"]
    target = "tpu-v5p-16384" + (f"x{slices}" if slices > 1 else "")
    published = (("AXLearn", None, mfu),) if mfu else ()
    return Row("llama2-70b", target, tuple(extra), published, "dense 150B, weak scaling")


BACKEND_RULE = ("--set", "mesh.targets={}")
"""The layout of the backend's own rule where the model ships with one that a search found: that is the program of the published
systems, to which predictions are fitted."""


LONG = settings(input__sequence_length=16384)
ROWS = (
    Row(
        "llama2-7b",
        "h100-8x32",
        BACKEND_RULE,
        (("AXLearn", 1.4, 0.542), ("MaxText", 1.4, 0.547), ("Megatron", 1.7, 0.449)),
    ),
    Row("llama2-7b", "tpu-v5p-512", BACKEND_RULE, (("AXLearn", 2.5, 0.662), ("MaxText", 2.7, 0.616))),
    Row("llama2-7b", "trn2-16x64", (), (("AXLearn", 1.2, 0.242),)),
    Row(
        "llama2-70b",
        "h100-8x64",
        BACKEND_RULE,
        (("AXLearn", 9.2, 0.400), ("Megatron", 7.8, 0.472), ("MaxText", 9.4, 0.391)),
    ),
    Row("llama2-70b", "tpu-v5p-1024", BACKEND_RULE, (("AXLearn", 11.6, 0.680), ("MaxText", 12.3, 0.644))),
    Row("llama2-70b", "trn2-16x64", (), (("AXLearn", 11.2, 0.250),)),
    Row("qwen3-30b-a3b", "tpu-v5p-1024", LONG, (("AXLearn", 12.9, 0.316), ("MaxText", 13.0, 0.313)), "sequence 16384"),
    Row("qwen3-30b-a3b", "b200-8x64", LONG, (("AXLearn", 4.3, 0.192), ("Megatron", 4.1, 0.202)), "sequence 16384"),
    scaled(256, 0.630),
    scaled(1024, None),
    scaled(2048, None),
    scaled(4096, 0.524),
    dense_150b(1, 0.406),
    dense_150b(2, None),
    dense_150b(4, 0.376),
)


def measure(row: Row, installed: set[str]) -> dict:
    if row.model not in installed:
        return {"error": f"the experiment {row.model} is not installed"}
    command = [sys.executable, "-m", "axlearn_core", "plan", row.model, "--target", row.target, "--json", *row.extra]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    if process.returncode not in (0, 1) or not process.stdout.startswith("{"):
        return {
            "error": process.stderr.strip().splitlines()[0] if process.stderr.strip() else f"exit {process.returncode}"
        }
    return json.loads(process.stdout)


def format_value(value, form="{:.2f}", scale=1.0):
    return "?" if value is None else form.format(value * scale)


def lines(row: Row, plan: dict) -> list[str]:
    head = f"{row.model} on {row.target}" + (f" ({row.note})" if row.note else "")
    if "error" in plan:
        return [head, f"    no plan: {plan['error']}"]
    gib, step = 1 / 2**30, plan["roofline_step_seconds"]
    fits = "fits" if plan["fits"] else "DOES NOT FIT"
    total = plan["argument_bytes"] + plan["temporary_bytes"] + plan["code_bytes"]
    parts = ", ".join(f"{k} {format_value(v)} s" for k, v in plan["roofline_seconds"].items())
    results = [
        head,
        f"    {fits}: {total * gib:.1f} of {format_value(plan['hbm_bytes'], '{:.1f}', gib)} GiB a chip; "
        f"{plan['parameters'] / 1e9:.1f}B parameters; mesh {plan['mesh']}",
        f"    roofline  {format_value(step)} s, MFU {format_value(plan['roofline_mfu'], '{:.1f}', 100)}% full, "
        f"{format_value(plan['roofline_mfu_causal'], '{:.1f}', 100)}% causal; bound by {plan['roofline_bound']} ({parts})",
    ]
    for system, seconds, mfu in row.published:
        results.append("    published " + compared(system, seconds, mfu, plan))
    results += [f"    note: {note}" for note in plan["notes"]]
    results.append(f"    compiled in {plan['compile_seconds']:.0f} s")
    return results


def compared(system, seconds, mfu, plan) -> str:
    """A published figure, what it means in our count of FLOPs, and whether our roofline allows it."""
    step, best = plan["roofline_step_seconds"], plan["roofline_mfu"]
    if step is None or best is None:
        return f"{system} {format_value(seconds)} s, {format_value(mfu, '{:.1f}', 100)}%"
    if seconds is None:  # only the MFU is published
        seconds, from_mfu = step * best / mfu, " (from its MFU)"
    else:
        from_mfu = ""
    ours = best * step / seconds
    causal = plan["roofline_mfu_causal"] * step / seconds
    text = f"{system} {seconds:.2f} s{from_mfu}, {format_value(mfu, '{:.1f}', 100)}%: in our count {100 * ours:.1f}% full, "
    text += f"{100 * causal:.1f}% causal; the roofline is {100 * step / seconds:.0f}% of it"
    if mfu and abs(ours / mfu - 1) > 0.03:
        text += f"; its MFU counts {mfu / ours:.2f} times our FLOPs or peak"
    return text if seconds >= step else f"{text}; {contradiction(seconds, plan)}"


def contradiction(seconds, plan) -> str:
    """A published step below our roofline: which of the two is wrong.

    What the mathematics takes at the hardware's peak bounds every program; what ours moves and sends bounds ours only.
    """
    bounds = plan["roofline_seconds"]
    least = plan["roofline_step_seconds"] * plan["roofline_mfu_causal"]  # model FLOPs, none computed twice, at the peak
    if seconds < least:
        return f"FASTER THAN THE ROOFLINE: below {least:.2f} s, so the published figure, our FLOPs or the peak is wrong"
    ours = ", ".join(f"{k} {v:.2f} s" for k, v in bounds.items() if k != "serial" and v is not None and v > seconds)
    return f"FASTER THAN THE ROOFLINE: the hardware allows it ({least:.2f} s), and it is our program that does too much: {ours}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose model, target or note has this text")
    parser.add_argument("--between", action="store_true", help="all sizes of the scaling curves, not only their ends")
    parser.add_argument("--json", type=Path, help="write all plans to this file")
    args = parser.parse_args()
    process = subprocess.run(
        [sys.executable, "-m", "axlearn_core", "experiments", "list", "--json"], capture_output=True, text=True
    )
    installed = {e["name"] for e in json.loads(process.stdout)}
    plans, started = [], time.perf_counter()
    rows = [r for r in ROWS if args.only in f"{r.model} {r.target} {r.note}" and (r.published or args.between)]
    # libtpu's compiler keeps both cores busy; the others are on one most of the time.
    beside = [r for r in rows if not r.target.startswith("tpu")]
    with ThreadPoolExecutor(2) as pool:
        by_row = dict(zip(beside, pool.map(functools.partial(measure, installed=installed), beside), strict=True))
    for row in rows:
        plan = by_row.get(row) or measure(row, installed)
        print("\n".join(lines(row, plan)), flush=True)
        plans.append({"model": row.model, "target": row.target, "note": row.note, **plan})
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    print(f"{len(plans)} rows in {time.perf_counter() - started:.0f} s on {os.cpu_count()} cores; load {load}")
    if args.json:
        args.json.write_text(json.dumps(plans, indent=1))


if __name__ == "__main__":
    main()
