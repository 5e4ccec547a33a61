"""Compare layouts for the published training runs: our default, the search result, and the paper's. All are compiled.

    uv run python benchmarks/layout_search.py [--only TEXT] [--budget MINUTES] [--sample N] [--json FILE] [--cache DIR]
        [--store FILE]

For each workload, it reports the time to rank all legal layouts. It compares the best layout that the search compiles
within its budget with the layout that ships and the paper's layout (arXiv 2507.05411: tensor parallelism over a host of
H100s, FSDP across hosts). Then it compiles `--sample` layouts spread evenly over the ranking, from the fastest to the
slowest that fits by estimate. For these it reports Kendall's tau between the estimated times and the times from the
compiled programs' FLOPs, bytes and collectives, and the error of the estimated memory. Times come from the model of
docs/plan.md ("predicted"), not from a run. `--store benchmarks/results/layouts.json` stores every compiled layout and
replaces the file's entries for the same workloads. The test tests/plugins/plan/search/test_search_stored.py compares
the layouts that ship with this file.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from scipy.stats import kendalltau

from axlearn_core.config import flatten
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.search.compile_layouts import Cache, Clock, compile_layouts, resolved_request
from axlearn_plugins_plan.search.rank import Space
from axlearn_plugins_plan.search.search import search

GIB = 2.0**30


@dataclass(frozen=True)
class Row:
    model: str
    target: str
    features: tuple[str, ...] = ()  # settings of the paper's layout on top of the default
    settings: tuple[str, ...] = ()


ROWS = (
    Row("llama2-7b", "h100-8x32", ("remat:policy=gpu-attention",), ("mesh.shape={fsdp: 32, tensor: 8}",)),
    Row(
        "llama2-70b",
        "h100-8x64",
        settings=("mesh.targets={}", "mesh.shape={fsdp: 64, tensor: 8}", "mesh.rules.activation_embed=[]"),
    ),
    Row("llama2-7b", "tpu-v5p-512", ("remat:policy=tpu-attention",), ("mesh.shape={fsdp: 256}",)),
    Row("llama2-70b", "tpu-v5p-1024", settings=("mesh.targets={}",)),
)


def spread(rows, count):
    """Return items spread evenly over the ranking, including the first and the last."""
    if count >= len(rows):
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / max(count - 1, 1))] for i in range(count)]


def measure(row: Row, args, log_message) -> dict:
    request = Request.from_arguments(row.model, target=row.target)
    started = time.perf_counter()
    space = Space(request, ())
    ranked = space.rank_layouts(log_message)
    ranking = time.perf_counter() - started
    cache, clock = Cache(args.cache), Clock(60 * args.budget)
    result = search(request, [space], cache, clock, args.front, log_message) if args.front else None
    capacity = space.machine.target.hbm_bytes or float("inf")
    sample = spread([r for r in ranked if r.estimate.total < 0.97 * capacity], args.sample)
    clock = Clock(60 * args.budget)
    rows = [*[r for r in ranked if r.choice.shipped], *sample]
    compiled = list(zip(rows, compile_layouts(request, rows, cache, clock, log_message), strict=True))
    papers = measure_paper(row, cache, clock, log_message)
    searched = [] if result is None else [(r.ranked, r.compiled) for r in result.rows if r.compiled is not None]
    row_results = {
        "base": layout_of(resolve(request).config, space.machine.devices),
        "compiled": merged(stored_rows(request, [*searched, *compiled]), papers.pop("compiled", [])),
        "model": row.model,
        "target": row.target,
        "ranked": len(ranked),
        "ranking_seconds": ranking,
        "sample": [],
        **papers,
    }
    if result is not None and result.rows:
        best = result.rows[0]
        row_results["best"] = figures(best.ranked, best.compiled)
        row_results["ended"] = result.ended
    for r, c in compiled:
        if c.error:
            log_message(f"not compiled: {' '.join(r.choice.words)}: {c.error}")
            continue
        if r.choice.shipped:
            row_results["shipped"] = figures(r, c)
        if any(r is s for s in sample) and c.seconds is not None:
            row_results["sample"].append(figures(r, c))
    return row_results


def measure_paper(row: Row, cache, clock, log_message) -> dict:
    """Compile the paper's layout. Return nothing if it is the layout that ships."""
    if not row.features and not row.settings:
        return {}
    request = Request.from_arguments(row.model, target=row.target, with_=row.features, set=row.settings)
    own = [r for r in Space(request, ()).rank_layouts(log_message) if r.choice.shipped]
    (result,) = compile_layouts(request, own, cache, clock, log_message)
    if result.error:
        log_message(f"not compiled: the paper's layout: {result.error}")
        return {}
    words = [w for text in row.features for w in ("--with", text)] + [
        w for text in row.settings for w in ("--set", text)
    ]
    return {
        "paper": {**figures(own[0], result), "words": " ".join(words)},
        "compiled": [{**stored, "words": words} for stored in stored_rows(request, [(own[0], result)])],
    }


def merged(rows: list[dict], more: list[dict]) -> list[dict]:
    """Return the distinct layouts of both, fastest first."""
    new = [r for r in more if all(r["layout"] != other["layout"] for other in rows)]
    return sorted([*rows, *new], key=lambda r: (not r["fits"], r["seconds"], r["words"]))


def layout_of(config, devices: int) -> dict:
    """Return a comparable form of a layout: meshes by their axes of more than one device."""
    stack, learner = config.model.decoder.stack, config.learner
    return {
        "mesh": {axis: size for axis, size in config.mesh.sizes(devices).items() if size > 1},
        "rules": {axis: list(axes) for axis, axes in sorted(config.mesh.rules.items())},
        "stack": {path: str(value) for path, value in sorted(flatten(stack).items())},
        "microbatches": learner.accumulate_steps,
        "offload_optimizer": getattr(learner, "offload", False),
    }


def stored_rows(request: Request, compiled) -> list[dict]:
    """Return every distinct layout, fastest first."""
    rows = {
        ranked.choice.words: {
            "words": list(ranked.choice.words),
            "layout": layout_of(resolve(resolved_request(request, ranked)).config, ranked.machine.devices),
            "seconds": round(result.seconds, 4),
            "estimated_seconds": round(ranked.seconds, 4),
            "gib": round(result.bytes / GIB, 2),
            "estimated_gib": round(ranked.estimate.total / GIB, 2),
            "fits": result.fits,
        }
        for ranked, result in compiled
        if not result.error and result.seconds is not None
    }
    return sorted(rows.values(), key=lambda r: (not r["fits"], r["seconds"], r["words"]))


def store(path: Path, every: list[dict]) -> None:
    """Write the layouts of some workloads to the file, ordered by model and target.

    `base` is the layout that shipped when they were compiled. The settings of each layout override it.
    """
    trainings = json.loads(path.read_text("utf-8")) if path.exists() else []
    new = [{"model": r["model"], "target": r["target"], "base": r["base"], "layouts": r["compiled"]} for r in every]
    names = {(r["model"], r["target"]) for r in new}
    rows = [*(r for r in trainings if (r["model"], r["target"]) not in names), *new]
    rows.sort(key=lambda r: (r["model"], r["target"]))
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def figures(ranked, compiled) -> dict:
    return {
        "words": " ".join(ranked.choice.words) or "as it ships",
        "seconds": compiled.seconds,
        "estimated_seconds": ranked.seconds,
        "gib": compiled.bytes / GIB,
        "estimated_gib": ranked.estimate.total / GIB,
        "fits": compiled.fits,
        "columns": {k: v / GIB for k, v in ranked.estimate.columns.items()},
        "kept_gib": ranked.estimate.kept / GIB,
        "arguments_gib": compiled.arguments / GIB,
    }


def lines(results: dict) -> list[str]:
    text = [
        f"{results['model']} on {results['target']}: {results['ranked']:,} layouts ranked in {results['ranking_seconds']:.1f} s"
    ]
    for name in ("best", "shipped", "paper"):
        if name in results:
            f = results[name]
            text.append(f"    {name:8} {f['seconds']:.3f} s  {f['gib']:.1f} GiB  fits: {f['fits']}  {f['words']}")
    sample = results["sample"]
    if len(sample) > 1:
        found_tau: Any = kendalltau([s["estimated_seconds"] for s in sample], [s["seconds"] for s in sample])
        tau = found_tau.statistic
        errors = sorted(abs(s["estimated_gib"] / s["gib"] - 1) for s in sample)
        close = sum(e <= 0.05 for e in errors)
        results.update(tau=tau, memory_errors=errors)
        text.append(
            f"    sample of {len(sample)}: Kendall's tau {tau:.2f}; memory within 5% for {close} of {len(errors)}, "
            f"median {100 * errors[len(errors) // 2]:.1f}%, greatest {100 * errors[-1]:.1f}%"
        )
        for s in sample:
            text.append(
                f"        {s['estimated_seconds']:.2f} s estimated, {s['seconds']:.2f} s; "
                f"{s['estimated_gib']:.1f} GiB estimated, {s['gib']:.1f} GiB  {s['words']}"
            )
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose model or target contains this text")
    parser.add_argument("--budget", type=float, default=10.0, help="minutes for the search, and also for the sample")
    parser.add_argument(
        "--front", type=int, default=8, help="number of layouts that the search compiles (0 skips the search)"
    )
    parser.add_argument("--sample", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", type=Path, help="file of compiled layouts to update")
    parser.add_argument("--cache", type=Path, default=Path("runs/layouts"))
    args = parser.parse_args()
    every = []
    for row in ROWS:
        if args.only in f"{row.model} {row.target}":
            every.append(measure(row, args, lambda line: print(line, flush=True)))
            print("\n".join(lines(every[-1])), flush=True)
    if args.json:
        args.json.write_text(json.dumps(every, indent=1))
    if args.store:
        store(args.store, every)


if __name__ == "__main__":
    main()
