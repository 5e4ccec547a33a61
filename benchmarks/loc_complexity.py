"""Count the lines that a new feature changes as modules and experiments grow, and check that the feature is active.

    python benchmarks/loc_complexity.py [--modules 20] [--experiments 50] [--configs 1000] [--json] [--plot lines.png]

Generates projects of N modules x M experiments as source in git repositories. Then it integrates rotary positions (RoPE),
a mixture of experts (MoE), dropout and five features that the shipped code does not know (token shift, a cache layout, an
objective, a recurrent layer, attention sinks) like a user would. `git diff --numstat` counts all lines that were added or
changed outside the feature's own package. In every cell of the largest project, it runs each feature to check that it is
active. It does the same for a project in which parents instantiate their children.

Exit code 1 if one of our slopes is above 0, an existing line changed, or a cell is inactive. Further goals: one line of
activation, modifiers of at most 10 lines, RoPE and MoE applied to 1,000 experiments in 2 seconds.
"""

import argparse
import itertools
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # runs thousands of forward passes of a few microseconds

from loc_projects import count, features, modules, packages, report, subtyping
from loc_projects.installed import installed

Lines = dict[tuple[int, int], dict[str, int]]
"""Lines by (modules, experiments) and file."""
STYLES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "ours": (modules.write, lambda root, feature, *_: features.integrate(root, feature)),
    "baseline": (subtyping.write, subtyping.integrate),
}


def steps(most: int, counts: tuple[int, ...]) -> list[int]:
    """Return the sizes up to the largest."""
    return sorted({min(w, most) for w in counts} | {most})


def counted(style: str, sizes: list[tuple[int, int]]) -> dict[str, Lines]:
    """Return the changed lines by feature, for projects of each size."""
    write, integrate = STYLES[style]
    results: dict[str, Lines] = {feature: {} for feature in features.ACTIVATION}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="loc-complexity-") as folder:
            root = Path(folder)
            write(root, *size)
            count.commit(root)
            for feature in results:
                integrate(root, feature, *size)
                results[feature][size] = count.changed(root)
                count.undo(root)
    return results


def slopes(lines: Lines) -> dict[str, float]:
    """Return the lines per module at the most experiments, and per experiment at the most modules."""
    most_n, most_m = max(n for n, _ in lines), max(m for _, m in lines)
    along_n = sorted((n, sum(files.values())) for (n, m), files in lines.items() if m == most_m)
    along_m = sorted((m, sum(files.values())) for (n, m), files in lines.items() if n == most_n)
    return {"N": count.slope(*zip(*along_n, strict=True)), "M": count.slope(*zip(*along_m, strict=True))}


def prove_ours(n: int, m: int, tell: Callable[[str], None]) -> dict[str, set[tuple[int, int]]]:
    """Return the active cells by feature. The cores share the experiments."""
    results: dict[str, set[tuple[int, int]]] = {feature: set() for feature in features.ACTIVATION}
    size = 10  # experiments per task, so that a process reuses its compiled code
    parts = [(f, range(j, min(j + size, m))) for f in results for j in range(0, m, size)]
    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1), get_context("spawn")) as pool:
        waiting = {pool.submit(proven, feature, n, m, part): (feature, part) for feature, part in parts}
        for future in as_completed(waiting):
            feature, part = waiting[future]
            cells, problems = future.result()
            results[feature] |= cells
            tell(f"{feature}: {len(cells)} of {n * len(part)} cells of experiments {part[0]} to {part[-1]} are active")
            for problem in problems:
                tell(problem)
    return results


def proven(feature: str, n: int, m: int, experiments: range) -> tuple[set[tuple[int, int]], list[str]]:
    """Return the cells of some experiments in which a feature is active, after the counted integration."""
    import jax
    from loc_projects import cells

    from axlearn_core.errors import AxlearnError

    jax.config.update("jax_disable_most_optimizations", True)  # not worth it for code that runs once
    active, problems = set(), []
    with tempfile.TemporaryDirectory(prefix="loc-complexity-") as folder:
        root = Path(folder)
        modules.write(root, n, m)
        plain = runpy.run_path(str(root / "launch.py"))["config"]
        features.integrate(root, feature)
        launch = runpy.run_path(str(root / "launch.py"))["config"]
        own = [packages.folder(root, feature)] if feature in packages.SOURCES else []
        with installed(root, *own, site=root / "site"):
            for i, j in itertools.product(range(n), experiments):
                name = modules.name(i, j)
                try:
                    before, after = plain(name), launch(name)
                    modifier = features.MODIFIERS.get(feature)
                    same = modifier is None or modifier(before) == after
                    if same and cells.active(before, after, feature):
                        active.add((i, j))
                except (AxlearnError, TypeError, AttributeError) as error:  # a failing cell is inactive
                    problems.append(f"{name}: {type(error).__name__}: {error}")
    return active, problems


def prove_baseline(n: int, m: int) -> dict[str, set[tuple[int, int]]]:
    """Return the active cells of the baseline by feature."""
    results = {}
    for feature in features.ACTIVATION:
        with tempfile.TemporaryDirectory(prefix="loc-complexity-") as folder:
            root = Path(folder)
            subtyping.write(root, n, m)
            subtyping.integrate(root, feature, n, m)
            with subtyping.importable(root):
                results[feature] = {(i, j) for i in range(n) for j in range(m) if subtyping.active(i, j, feature)}
    return results


def timed(n: int, m: int, total: int) -> dict[str, float]:
    """Return the seconds to apply RoPE and MoE to a number of experiments.

    Measures the two features alone, and complete requests by name.
    """
    from axlearn_core.config import patch
    from axlearn_core.plugins.resolve import resolve
    from axlearn_plugins_moe.feature import MoE
    from axlearn_plugins_rope.feature import Rope

    with tempfile.TemporaryDirectory(prefix="loc-complexity-") as folder:
        root = Path(folder)
        modules.write(root, n, m)
        names = [modules.name(k % n, k // n % m) for k in range(total)]
        with installed(root, site=root / "site"):
            configs = [patch(resolve(name).config, {"seed": k}) for k, name in enumerate(names)]
            rope, moe = Rope(theta=100.0), MoE(num_experts=4, top_k=2)
            start = time.perf_counter()
            for cfg in configs:
                rope.apply(moe.apply(cfg))
            middle = time.perf_counter()
            with_ = [features.ACTIVATION["rope"], features.ACTIVATION["moe"]]
            for name in names:
                resolve(name, with_=with_)
            return {"apply": middle - start, "resolve": time.perf_counter() - middle}


def measured(n: int, m: int, configs: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return all results for projects of up to n modules and m experiments."""
    sizes = [(a, b) for a in steps(n, (1, 5, 10, 20)) for b in steps(m, (1, 10, 25, 50))]
    lines = {style: counted(style, sizes) for style in STYLES}
    active = {"ours": prove_ours(n, m, tell), "baseline": prove_baseline(n, m)}
    names = tuple(features.ACTIVATION)

    def facts(style: str) -> dict[str, Any]:
        most = {f: lines[style][f][n, m] for f in names}
        return {
            "slopes": {f: slopes(lines[style][f]) for f in names},
            "changed_lines": {f: sum(v for k, v in most[f].items() if k != count.LAUNCHER) for f in names},
            "activation_lines": {f: most[f].get(count.LAUNCHER, 0) for f in names},
            "active": {f: len(active[style][f]) for f in names},
            "active_cells": len(set.intersection(*active[style].values())),
            "lines": {f: [[*s, sum(v.values())] for s, v in sorted(lines[style][f].items())] for f in names},
        }

    return {
        "modules": n,
        "experiments": m,
        "cells": n * m,
        **facts("ours"),
        "modifier_lines": features.modifier_lines(),
        "timed_configs": configs,
        "seconds": timed(n, m, configs),
        "baseline": facts("baseline"),
    }


def failures(results: dict[str, Any]) -> list[str]:
    """Return the goals that were missed."""
    wrong = []
    for feature in features.ACTIVATION:
        wrong += [f"{feature}: {v:g} lines per {k}" for k, v in results["slopes"][feature].items() if v > 0]
        if results["changed_lines"][feature]:
            wrong.append(f"{feature}: {results['changed_lines'][feature]} lines of existing files changed")
        if inactive := results["cells"] - results["active"][feature]:
            wrong.append(f"{feature}: inactive in {inactive} of {results['cells']} cells")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=20, choices=range(1, 61), metavar="N", help="1 to 60")
    parser.add_argument("--experiments", type=int, default=50, choices=range(1, 100), metavar="M", help="1 to 99")
    parser.add_argument("--configs", type=int, default=1000, help="number of configs to time RoPE and MoE on")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--plot", type=Path, help="write a PNG; needs matplotlib")
    args = parser.parse_args()
    if args.plot:
        report.need_matplotlib()
    results = measured(
        args.modules, args.experiments, args.configs, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(json.dumps(results, indent=1) if args.json else report.table(results))
    if args.plot:
        report.plot(results, args.plot)
    wrong = failures(results)
    for line in wrong:
        print(f"FAILED {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
