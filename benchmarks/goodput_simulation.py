"""Simulate the goodput of a job of 32,768 chips, from published failure rates.

    python benchmarks/goodput_simulation.py [--days 400] [--seed 0] [--markdown FILE] [--plot FILE.png]

Varies spares, tier intervals and restore fan-out. Prints every assumption and its source: published, measured here
(`benchmarks/results`), or assumed. Nothing ran on such a machine. The results only depend on the seed.
`tests/benchmarks/test_goodput_simulation.py` compares the simulation with Daly's closed form.
"""

import argparse
import math
import sys
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).parent))

from goodput_model import DAY, Cluster, Outcome, Recovery, Simulation, Tier, daly_goodput, young_interval

GIB, MINUTE = 2**30, 60.0
PUBLISHED, MEASURED, ASSUMED = "published", "measured", "assumed"


@attrs.frozen(kw_only=True)
class Assumption:
    """An input of the simulation."""

    value: float
    unit: str
    kind: str
    source: str


ASSUMPTIONS = {
    "chips": Assumption(value=32768, unit="", kind=PUBLISHED, source="arXiv 2507.05411: its largest job"),
    "interruptions": Assumption(
        value=419, unit="", kind=PUBLISHED,
        source="Llama 3 (arXiv 2407.21783), section 3.3.4: unexpected interruptions in 54 days on 16,384 H100",
    ),
    "interruption days": Assumption(value=54, unit="days", kind=PUBLISHED, source="the same"),
    "interruption chips": Assumption(value=16384, unit="", kind=PUBLISHED, source="the same"),
    "hardware interruptions": Assumption(
        value=289, unit="", kind=PUBLISHED, source="the same, table 5: those in GPUs, NICs and other host hardware",
    ),
    "swap of the paper": Assumption(value=4, unit="min", kind=PUBLISHED, source="arXiv 2507.05411: slice hot swap"),
    "restore of the paper": Assumption(value=9, unit="min", kind=PUBLISHED, source="the same"),
    "all of the paper": Assumption(
        value=21, unit="min", kind=PUBLISHED, source="the same, with the progress since the last checkpoint",
    ),
    "save blocks": Assumption(
        value=0.20, unit="s/GiB", kind=MEASURED, source="2026-11-22-checkpoints.md: `save` blocks, one host of 2 cores",
    ),
    "save": Assumption(value=1.63, unit="s/GiB", kind=MEASURED, source="the same: time until it is complete, with hashes"),
    "restore": Assumption(value=1.58, unit="s/GiB", kind=MEASURED, source="the same: with every hash verified"),
    "start": Assumption(
        value=14.8, unit="s", kind=MEASURED,
        source="2026-11-21-cpu.md: a cold process until the first step of the quickstart, imports and compilation included",
    ),
    "detect": Assumption(value=1.0, unit="s", kind=ASSUMED, source="a dead process, reported by its host's agent"),
    "hang": Assumption(value=750, unit="s", kind=ASSUMED, source="1.25 times the watchdog's default limit of 600 s"),
    "hang share": Assumption(value=0.05, unit="", kind=ASSUMED, source="share of all failures"),
    "compile": Assumption(value=30, unit="s", kind=ASSUMED, source="loading a large step from the compile cache"),
    "compile without cache": Assumption(value=300, unit="s", kind=ASSUMED, source="compiling a large step"),
    "repair": Assumption(value=24, unit="h", kind=ASSUMED, source="mean time to repair a host, exponential"),
    "chips of a host": Assumption(value=8, unit="", kind=ASSUMED, source="hosts are swapped as a whole"),
    "parameters": Assumption(value=150e9, unit="", kind=PUBLISHED, source="arXiv 2507.05411: its largest model"),
    "bytes of a parameter": Assumption(value=12, unit="B", kind=ASSUMED, source="float32, with two moments"),
    "replicas": Assumption(value=8, unit="", kind=ASSUMED, source="data-parallel groups, each with the full state"),
    "store": Assumption(value=125, unit="GB/s", kind=ASSUMED, source="an object store, all hosts together (1 Tbit/s)"),
    "network": Assumption(value=25, unit="GB/s", kind=ASSUMED, source="per host, for the broadcast between replicas"),
    "local lost": Assumption(value=0.05, unit="", kind=ASSUMED, source="share of failures without complete local checkpoints"),
}  # fmt: skip


def a(name: str) -> float:
    """Return the value of an assumption."""
    return ASSUMPTIONS[name].value


def failures_per_day(factor: float = 1.0) -> float:
    """Return the failures of the whole job per day, from the published rate per chip."""
    return factor * a("interruptions") / a("interruption days") / a("interruption chips") * a("chips")


def cluster(spares: int, factor: float = 1.0) -> Cluster:
    """Return the job's hosts."""
    share = a("hardware interruptions") / a("interruptions")
    return Cluster(
        failures_per_day=failures_per_day(factor), hardware_share=share, spares=spares, repair=a("repair") * 3600
    )


def host_gib() -> float:
    """Return the state per host in GiB."""
    hosts = a("chips") / a("chips of a host") / a("replicas")
    return a("parameters") * a("bytes of a parameter") / hosts / GIB


def store_restore(readers: int) -> float:
    """Return the seconds for some replicas to read the state and broadcast it to the others by doubling."""
    state = a("parameters") * a("bytes of a parameter")
    read = max(readers * state / (a("store") * 1e9), host_gib() * a("restore"))
    rounds = math.ceil(math.log2(a("replicas") / readers))
    return read + rounds * host_gib() * GIB / (a("network") * 1e9)


def persistent(every: float, readers: int = 1) -> Tier:
    """Return the tier in the object store. Every replica writes its share of the state."""
    written = a("parameters") * a("bytes of a parameter") / (a("store") * 1e9)
    durable = max(written, host_gib() * a("save") / a("replicas"))
    # The replicas save one copy of the state together, so each host writes its share.
    blocks = host_gib() * a("save blocks") / a("replicas")
    return Tier(every=every, blocks=blocks, durable=durable, restore=store_restore(readers))


def local(every: float) -> Tier:
    """Return the tier on the hosts' disks. A swapped host gets its share from another replica."""
    size = host_gib()
    handed = size * GIB / (a("network") * 1e9)
    return Tier(
        every=every,
        blocks=size * a("save blocks"),
        durable=size * a("save"),
        restore=size * a("restore") + handed,
    )


def ours() -> Recovery:
    """Return the recovery of `axlearn launch`."""
    start = a("start")
    return Recovery(
        detect=a("detect"), hang=a("hang"), hang_share=a("hang share"), swap=start, restart=start, compile=a("compile")
    )


def paper() -> tuple[Recovery, Tier]:
    """Return the published recovery.

    Of the 21 minutes, the time that is not explained is lost progress, which is half an interval on average.
    """
    swap, restore = a("swap of the paper") * MINUTE, a("restore of the paper") * MINUTE
    lost = a("all of the paper") * MINUTE - swap - restore
    recovery = Recovery(detect=0, hang=0, hang_share=0, swap=swap, restart=swap, compile=0)
    return recovery, Tier(every=2 * lost, blocks=0, durable=0, restore=restore)


def restart_all() -> Recovery:
    """Return a recovery that restarts everything without a compile cache. Only JAX's heartbeat detects hangs."""
    return attrs.evolve(ours(), detect=100.0, compile=a("compile without cache"))


class Study:
    """The tables. All rows use the same seed."""

    def __init__(self, days: float, seed: int):
        self.days, self.seed = days, seed

    def run(self, of: Cluster, recovery: Recovery, store: Tier, near: Tier | None = None) -> Outcome:
        """Run one simulation."""
        lost = a("local lost")
        return Simulation(of, recovery, store, near, local_lost=lost, seed=self.seed).run(self.days)

    def compare(self) -> dict[str, Outcome]:
        """Compare our phases with the published minutes, with enough spares for both."""
        recovery, tier = paper()
        of = cluster(spares=64)
        return {
            "restart all, a checkpoint every 30 min, all replicas read": self.run(
                of, restart_all(), persistent(30 * MINUTE, int(a("replicas")))
            ),
            "the published: 4 min swap, 9 min restore, 21 min in all": self.run(of, recovery, tier),
            "ours, a checkpoint every 10 min": self.run(of, ours(), persistent(10 * MINUTE)),
            "ours, and one on the hosts every 2 min": self.run(of, ours(), persistent(10 * MINUTE), local(2 * MINUTE)),
        }

    def spares(self) -> dict[int, Outcome]:
        """Return the goodput by number of spare hosts."""
        return {n: self.run(cluster(n), ours(), persistent(600), local(120)) for n in (0, 4, 8, 12, 16, 24, 32)}

    def intervals(self) -> dict[tuple[float, float | None], Outcome]:
        """Return the goodput by persistent and local interval in seconds."""
        pairs = [(p, near) for p in (300.0, 600.0, 1800.0, 3600.0) for near in (None, 30.0, 60.0, 120.0, 300.0)]
        return {
            (p, near): self.run(cluster(64), ours(), persistent(p), None if near is None else local(near))
            for p, near in pairs
            if near is None or near < p
        }

    def fan_out(self) -> dict[int, tuple[float, Outcome]]:
        """Return the restore time and the goodput by number of reading replicas. All restores read the object store."""
        return {n: (store_restore(n), self.run(cluster(64), ours(), persistent(600, n))) for n in (1, 2, 4, 8)}

    def rates(self) -> dict[float, tuple[Outcome, Outcome]]:
        """Return our goodput and the paper's by factor of the published failure rate."""
        recovery, tier = paper()
        return {
            f: (
                self.run(cluster(64, f), ours(), persistent(600), local(120)),
                self.run(cluster(64, f), recovery, tier),
            )
            for f in (0.25, 0.5, 1.0, 2.0, 4.0)
        }


def percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def report(study: Study) -> list[str]:
    """Return all inputs and results as Markdown."""
    per_day = failures_per_day()
    mean = DAY / per_day
    lines = [f"{study.days:g} simulated days for each row, seed {study.seed}.", "", "## What goes in", ""]
    lines += table(
        ["figure", "value", "kind", "source"],
        [[name, f"{one.value:,g} {one.unit}".strip(), one.kind, one.source] for name, one in ASSUMPTIONS.items()],
    )
    save = local(120).blocks
    from_these = (
        f"From these: {per_day:.1f} failures a day, one every {mean / MINUTE:.0f} min; {host_gib():.2f} GiB of state on each "
        f"host; a local save blocks {save:.2f} s, so Young's interval is {young_interval(save, mean):.0f} s."
    )
    lines += ["", from_these]
    lines += ["", "## Beside the published minutes", ""]
    rows = []
    for name, one in study.compare().items():
        losses = {k: v for k, v in one.seconds.items() if k != "productive"}
        each = sum(losses.values()) / one.failures / MINUTE
        worst = max(losses, key=losses.__getitem__)
        rows.append(
            [
                name,
                percent(one.goodput),
                f"{each:.1f} min",
                f"{worst} ({percent(losses[worst] / sum(one.seconds.values()))})",
            ]
        )
    lines += table(["run", "goodput", "lost for each failure", "most of it"], rows)
    lines += ["", "## Spare hosts", ""]
    rows = [
        [str(n), percent(o.goodput), percent(o.seconds["no spare"] / sum(o.seconds.values()))]
        for n, o in study.spares().items()
    ]
    lines += table(["spares", "goodput", "waiting for a host"], rows)
    lines += ["", "## Intervals of the tiers", ""]
    intervals = study.intervals()
    columns = list(dict.fromkeys(near for _, near in intervals))
    head = ["object store every", *("no local tier" if c is None else f"local every {c:g} s" for c in columns)]
    rows = [
        [f"{p / MINUTE:g} min", *(percent(intervals[p, c].goodput) if (p, c) in intervals else "" for c in columns)]
        for p in dict.fromkeys(p for p, _ in intervals)
    ]
    lines += table(head, rows)
    lines += ["", "## Restore fan-out, without a local tier", ""]
    rows = [[f"{n} of {a('replicas'):g}", f"{s:.1f} s", percent(o.goodput)] for n, (s, o) in study.fan_out().items()]
    lines += table(["replicas that read", "restore", "goodput"], rows)
    lines += ["", "## Other failure rates", ""]
    rows = [[f"{f:g} x", percent(x.goodput), percent(y.goodput)] for f, (x, y) in study.rates().items()]
    lines += table(["of the published rate", "ours", "the published minutes"], rows)
    lines += ["", "## Against the closed form", ""]
    rows = []
    for interval in (60.0, 300.0, 1200.0, 3600.0):
        tier = Tier(every=interval, blocks=5.0, durable=5.0, restore=60.0)
        still = Recovery(detect=0, hang=0, hang_share=0, swap=0, restart=60.0, compile=0)
        one = Simulation(Cluster(failures_per_day=per_day), still, tier, seed=study.seed).run(10 * study.days)
        rows.append([f"{interval:g} s", percent(one.goodput), percent(daly_goodput(interval, 5.0, 120.0, mean))])
    lines += table(["interval (5 s saves, 120 s recovery)", "simulated", "Daly"], rows)
    return lines


def plot(study: Study, path: Path) -> None:
    """Plot goodput by spares, intervals and fan-out, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (one, two, three) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    spares = study.spares()
    one.plot(list(spares), [100 * o.goodput for o in spares.values()], "o-")
    one.set(xlabel="spare hosts", ylabel="goodput, %", title="spares")
    intervals = study.intervals()
    for p in dict.fromkeys(p for p, _ in intervals):
        nears = [(near, o.goodput) for (q, near), o in intervals.items() if q == p and near is not None]
        two.plot([n for n, _ in nears], [100 * g for _, g in nears], "o-", label=f"store every {p / MINUTE:g} min")
    two.set(xlabel="seconds between local saves", xscale="log", title="tier intervals")
    two.legend(frameon=False)
    fan_out = study.fan_out()
    three.plot(list(fan_out), [100 * o.goodput for _, o in fan_out.values()], "o-")
    three.set(xlabel="replicas that read the object store", title="restore fan-out, no local tier")
    figure.suptitle(f"{a('chips'):,g} chips, {failures_per_day():.1f} failures a day (simulated)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="also write the report to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this PNG or SVG file")
    args = parser.parse_args()
    study = Study(args.days, args.seed)
    text = "\n".join(report(study))
    print(text)
    if args.markdown:
        command = f"`python benchmarks/goodput_simulation.py --days {args.days:g} --seed {args.seed}`"
        title = "# Goodput at 32,768 chips, simulated"
        args.markdown.write_text(f"{title}\n\n{command}. No such machine was used. {text}\n")
    if args.plot:
        plot(study, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
