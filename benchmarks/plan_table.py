"""Compare our plans of the published training runs with the published figures: step time, MFU, memory.

    uv run python benchmarks/plan_table.py [--only TEXT] [--between] [--json FILE]

Each row is a separate `axlearn plan ... --json` process. Rows for GPUs and Trainium run two at a time, which makes each
slower to compile. Nothing runs on the hardware. The published figures are from AXLearn (arXiv 2507.05411) and the
systems that it compares with. Unless a row says otherwise, the global batch is 1024 and the sequence length 4096. The
roofline is the minimum time that the hardware allows (docs/plan.md). A published time below it means that one of the
two figures is wrong. MFU counts full attention, like the paper, and is also given for causal attention. The
weak-scaling rows keep the rows per chip of the base. The paper does not give the 150B model's sizes, batch and mesh, so
they are ours. By default, only the ends of the two weak-scaling curves are planned, which have published figures.
`--between` also plans the sizes between them.
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
    """A published training: seconds per step and MFU by system, if they are known."""

    model: str
    target: str
    extra: tuple[str, ...] = ()
    published: tuple[tuple[str, float | None, float | None], ...] = ()
    note: str = ""


def settings(**values):
    return tuple(w for k, v in values.items() for w in ("--set", f"{k.replace('__', '.')}={v}"))


def scaled(chips: int, mfu: float | None) -> Row:
    """Return 70B with two rows of 4096 tokens per chip, in one slice. With 512 chips, it is the row of the table above."""
    published = (("AXLearn", None, mfu),) if mfu else ()
    return Row("llama2-70b", f"tpu-v5p-{2 * chips}", settings(input__batch_size=2 * chips), published, "weak scaling")


def dense_150b(slices: int, mfu: float | None) -> Row:
    """Return 150B at length 8192, with one row per four chips.

    It uses tensor parallelism over 4, FSDP over 512, and data parallelism over the other chips.
    """
    model = {"hidden_dim": 12288, "layer.attention.num_heads": 96, "layer.feed_forward.hidden_dim": 41984}
    extra = [w for k, v in model.items() for w in ("--set", f"model.decoder.{k}={v}")]
    extra += settings(input__sequence_length=8192, input__batch_size=2048 * slices)
    extra += ["--set", "mesh.shape={data: -1, fsdp: 512, tensor: 4}"]
    target = "tpu-v5p-16384" + (f"x{slices}" if slices > 1 else "")
    published = (("AXLearn", None, mfu),) if mfu else ()
    return Row("llama2-70b", target, tuple(extra), published, "dense 150B, weak scaling")


BACKEND_RULE = ("--set", "mesh.targets={}")
"""Layout of the backend's mesh rule, for models that ship with a layout from a search. The published systems use the mesh rule's
layout, and predictions are fitted to it."""


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
    """Return a published figure, its value in our count of FLOPs, and whether our roofline allows it."""
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
    """Explain a published step below our roofline.

    The model FLOPs at the hardware's peak bound every program. Memory traffic and communication of our program only
    bound ours.
    """
    bounds = plan["roofline_seconds"]
    least = (
        plan["roofline_step_seconds"] * plan["roofline_mfu_causal"]
    )  # model FLOPs at the peak, without recomputation
    if seconds < least:
        return f"FASTER THAN THE ROOFLINE: below {least:.2f} s, so the published figure, our FLOPs or the peak is wrong"
    ours = ", ".join(f"{k} {v:.2f} s" for k, v in bounds.items() if k != "serial" and v is not None and v > seconds)
    return f"FASTER THAN THE ROOFLINE: the hardware allows it ({least:.2f} s), and it is our program that does too much: {ours}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose model, target or note contains this text")
    parser.add_argument(
        "--between", action="store_true", help="plan all sizes of the scaling curves, not only their ends"
    )
    parser.add_argument("--json", type=Path, help="write all plans to this file")
    args = parser.parse_args()
    process = subprocess.run(
        [sys.executable, "-m", "axlearn_core", "experiments", "list", "--json"], capture_output=True, text=True
    )
    installed = {e["name"] for e in json.loads(process.stdout)}
    plans, started = [], time.perf_counter()
    rows = [r for r in ROWS if args.only in f"{r.model} {r.target} {r.note}" and (r.published or args.between)]
    # libtpu's compiler uses both cores. The other compilers mostly use one.
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
