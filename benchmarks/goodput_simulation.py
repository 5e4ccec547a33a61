"""Goodput of a job of 32,768 chips: against spares, tier intervals and restore fan-out, from published failure rates.

    python benchmarks/goodput_simulation.py [--days 400] [--seed 0] [--markdown FILE] [--plot FILE.png]

Prints every assumption with where it is from: published, measured here (`benchmarks/results`), or assumed. Nothing in it ran
on such a machine. The same seed gives the same figures; `tests/benchmarks/test_goodput_simulation.py` holds the simulation
against Daly's closed form.
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
    """A figure that goes in."""

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
        value=289, unit="", kind=PUBLISHED, source="the same, table 5: of them in GPUs, NICs and other parts of a host",
    ),
    "swap of the paper": Assumption(value=4, unit="min", kind=PUBLISHED, source="arXiv 2507.05411: slice hot swap"),
    "restore of the paper": Assumption(value=9, unit="min", kind=PUBLISHED, source="the same"),
    "all of the paper": Assumption(
        value=21, unit="min", kind=PUBLISHED, source="the same, with the progress since the last checkpoint",
    ),
    "save blocks": Assumption(
        value=0.20, unit="s/GiB", kind=MEASURED, source="2026-11-22-checkpoints.md: `save` blocks, one host of 2 cores",
    ),
    "save": Assumption(value=1.63, unit="s/GiB", kind=MEASURED, source="the same: until it is complete, hashed"),
    "restore": Assumption(value=1.58, unit="s/GiB", kind=MEASURED, source="the same: every hash compared"),
    "start": Assumption(
        value=14.8, unit="s", kind=MEASURED,
        source="2026-11-21-cpu.md: a cold process until the first step of the quickstart, imports and compilation included",
    ),
    "detect": Assumption(value=1.0, unit="s", kind=ASSUMED, source="a process that died, reported by its host's agent"),
    "hang": Assumption(value=750, unit="s", kind=ASSUMED, source="1.25 times the watchdog's default limit of 600 s"),
    "hang share": Assumption(value=0.05, unit="", kind=ASSUMED, source="of all failures"),
    "compile": Assumption(value=30, unit="s", kind=ASSUMED, source="loading a large step from the compile cache"),
    "compile without cache": Assumption(value=300, unit="s", kind=ASSUMED, source="compiling a large step"),
    "repair": Assumption(value=24, unit="h", kind=ASSUMED, source="mean time until a host is back, exponential"),
    "chips of a host": Assumption(value=8, unit="", kind=ASSUMED, source="a host is what is swapped"),
    "parameters": Assumption(value=150e9, unit="", kind=PUBLISHED, source="arXiv 2507.05411: its largest model"),
    "bytes of a parameter": Assumption(value=12, unit="B", kind=ASSUMED, source="float32, with two moments"),
    "replicas": Assumption(value=8, unit="", kind=ASSUMED, source="data-parallel groups that each have the whole state"),
    "store": Assumption(value=125, unit="GB/s", kind=ASSUMED, source="an object store, all hosts together (1 Tbit/s)"),
    "network": Assumption(value=25, unit="GB/s", kind=ASSUMED, source="of a host, for the broadcast between replicas"),
    "local lost": Assumption(value=0.05, unit="", kind=ASSUMED, source="failures that leave no whole set of local checkpoints"),
}  # fmt: skip


def a(name: str) -> float:
    """The value of an assumption."""
    return ASSUMPTIONS[name].value


def failures_per_day(factor: float = 1.0) -> float:
    """Of the whole job, by the published rate per chip and day."""
    return factor * a("interruptions") / a("interruption days") / a("interruption chips") * a("chips")


def cluster(spares: int, factor: float = 1.0) -> Cluster:
    """The job's hosts."""
    share = a("hardware interruptions") / a("interruptions")
    return Cluster(
        failures_per_day=failures_per_day(factor), hardware_share=share, spares=spares, repair=a("repair") * 3600
    )


def host_gib() -> float:
    """State on each host."""
    hosts = a("chips") / a("chips of a host") / a("replicas")
    return a("parameters") * a("bytes of a parameter") / hosts / GIB


def store_restore(readers: int) -> float:
    """Seconds to read the state by so many replicas, and to hand it to the others by doubling."""
    state = a("parameters") * a("bytes of a parameter")
    read = max(readers * state / (a("store") * 1e9), host_gib() * a("restore"))
    rounds = math.ceil(math.log2(a("replicas") / readers))
    return read + rounds * host_gib() * GIB / (a("network") * 1e9)


def persistent(every: float, readers: int = 1) -> Tier:
    """In the object store; every replica writes its part of the state."""
    written = a("parameters") * a("bytes of a parameter") / (a("store") * 1e9)
    durable = max(written, host_gib() * a("save") / a("replicas"))
    # One copy of the state is saved, so that a host of one of the replicas copies and writes its share of it.
    blocks = host_gib() * a("save blocks") / a("replicas")
    return Tier(every=every, blocks=blocks, durable=durable, restore=store_restore(readers))


def local(every: float) -> Tier:
    """On each host's disk; a host that was swapped gets its part from another replica."""
    size = host_gib()
    handed = size * GIB / (a("network") * 1e9)
    return Tier(
        every=every,
        blocks=size * a("save blocks"),
        durable=size * a("save"),
        restore=size * a("restore") + handed,
    )


def ours() -> Recovery:
    """As `axlearn launch` recovers."""
    start = a("start")
    return Recovery(
        detect=a("detect"), hang=a("hang"), hang_share=a("hang share"), swap=start, restart=start, compile=a("compile")
    )


def paper() -> tuple[Recovery, Tier]:
    """The published minutes. What is left of the 21 is the progress lost, half an interval in the mean."""
    swap, restore = a("swap of the paper") * MINUTE, a("restore of the paper") * MINUTE
    lost = a("all of the paper") * MINUTE - swap - restore
    recovery = Recovery(detect=0, hang=0, hang_share=0, swap=swap, restart=swap, compile=0)
    return recovery, Tier(every=2 * lost, blocks=0, durable=0, restore=restore)


def restart_all() -> Recovery:
    """Everything is started again, with no compile cache; nobody watches for hangs but JAX's heartbeat."""
    return attrs.evolve(ours(), detect=100.0, compile=a("compile without cache"))


class Study:
    """The tables. Each row is a simulation with the same seed."""

    def __init__(self, days: float, seed: int):
        self.days, self.seed = days, seed

    def run(self, of: Cluster, recovery: Recovery, store: Tier, near: Tier | None = None) -> Outcome:
        """One simulation."""
        lost = a("local lost")
        return Simulation(of, recovery, store, near, local_lost=lost, seed=self.seed).run(self.days)

    def compare(self) -> dict[str, Outcome]:
        """Our phases beside the published minutes, with spares enough for both."""
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
        """Goodput against spare hosts."""
        return {n: self.run(cluster(n), ours(), persistent(600), local(120)) for n in (0, 4, 8, 12, 16, 24, 32)}

    def intervals(self) -> dict[tuple[float, float | None], Outcome]:
        """Goodput against (persistent, local) intervals in seconds."""
        pairs = [(p, near) for p in (300.0, 600.0, 1800.0, 3600.0) for near in (None, 30.0, 60.0, 120.0, 300.0)]
        return {
            (p, near): self.run(cluster(64), ours(), persistent(p), None if near is None else local(near))
            for p, near in pairs
            if near is None or near < p
        }

    def fan_out(self) -> dict[int, tuple[float, Outcome]]:
        """Replicas that read -> (seconds of a restore, goodput) where every restore is from the object store."""
        return {n: (store_restore(n), self.run(cluster(64), ours(), persistent(600, n))) for n in (1, 2, 4, 8)}

    def rates(self) -> dict[float, tuple[Outcome, Outcome]]:
        """Factor of the published failure rate -> (ours, the paper)."""
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
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def report(study: Study) -> list[str]:
    """Everything that goes in and comes out, as Markdown."""
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
        f"host; a local save blocks {save:.2f} s, so that Young's interval is {young_interval(save, mean):.0f} s."
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
    """Goodput against spares, intervals and fan-out, side by side."""
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
    parser.add_argument("--markdown", type=Path, help="write the report here too")
    parser.add_argument("--plot", type=Path, help="draw it, as PNG or SVG")
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
