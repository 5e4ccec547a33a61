"""The simulation of goodput, held against what can be computed."""

import importlib.util
import sys

import pytest

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("goodput_simulation", BENCHMARKS / "goodput_simulation.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before


def simple(benchmark, *, interval, save, recovery, mean, seed=0, days=4_000):
    still = benchmark.Recovery(detect=0, hang=0, hang_share=0, swap=0, restart=0, compile=0)
    tier = benchmark.Tier(every=interval, blocks=save, durable=save, restore=recovery)
    return benchmark.Simulation(benchmark.Cluster(failures_per_day=86400 / mean), still, tier, seed=seed).run(days)


@pytest.mark.slow_cases("60-5-120-40000.0", "60-5-120-5580.0", "600-30-600-40000.0")
@pytest.mark.parametrize("mean", [1800.0, 5580.0, 40000.0])
@pytest.mark.parametrize(("interval", "save", "recovery"), [(60, 5, 120), (600, 30, 600), (3600, 5, 0)])
def test_one_tier_is_dalys_closed_form(benchmark, interval, save, recovery, mean):
    expected = benchmark.daly_goodput(interval, save, recovery, mean)
    days = 4000 * mean / 86400 + 100
    assert simple(
        benchmark, interval=interval, save=save, recovery=recovery, mean=mean, days=days
    ).goodput == pytest.approx(expected, abs=0.012)


@pytest.mark.slow
def test_the_best_interval_is_youngs(benchmark):
    save, mean = 20.0, 20_000.0
    young = benchmark.young_interval(save, mean)
    assert young == pytest.approx(894, abs=1)
    best, *rest = (
        simple(benchmark, interval=young * f, save=save, recovery=60, mean=mean, days=4_000).goodput
        for f in (1, 0.25, 4)
    )
    assert all(best > other + 0.01 for other in rest)


def test_all_time_is_accounted_for_and_the_seed_decides_it(benchmark):
    study = benchmark.Study(days=30, seed=3)
    one, again = (
        study.run(benchmark.cluster(8), benchmark.ours(), benchmark.persistent(600), benchmark.local(60))
        for _ in range(2)
    )
    assert one == again
    assert 30 * 86400 <= sum(one.seconds.values()) < 40 * 86400
    assert benchmark.Study(days=30, seed=4).run(
        benchmark.cluster(8), benchmark.ours(), benchmark.persistent(600), benchmark.local(60)
    ) != one  # fmt: skip


def test_without_a_spare_the_job_waits_for_each_repair(benchmark):
    """Hardware fails every 24 h / (15.5 x 0.69) of training, and a repair takes 24 h."""
    study = benchmark.Study(days=4000, seed=0)
    outcome = study.run(benchmark.cluster(0), benchmark.ours(), benchmark.persistent(600), benchmark.local(60))
    hardware = 86400 / (benchmark.failures_per_day() * 289 / 419)
    share = outcome.seconds["no spare"] / sum(outcome.seconds.values())
    assert share == pytest.approx(86400 / (86400 + hardware), abs=0.02)
    goodput = [o.goodput for o in benchmark.Study(days=100, seed=0).spares().values()]
    assert goodput == sorted(goodput), "spares never hurt"


def test_published_rates_and_minutes(benchmark):
    assert benchmark.failures_per_day() == pytest.approx(15.5, abs=0.05)
    recovery, tier = benchmark.paper()
    assert recovery.swap + tier.restore + tier.every / 2 == 21 * 60
    fan_out = [benchmark.store_restore(n) for n in (1, 2, 4, 8)]
    assert fan_out == sorted(fan_out)
    assert fan_out[-1] == pytest.approx(8 * 1.8e12 / 125e9), "without a broadcast"


@pytest.mark.slow
def test_the_report_says_what_is_published_measured_and_assumed(benchmark, tmp_path):
    text = "\n".join(benchmark.report(benchmark.Study(days=2, seed=0)))
    for name, one in benchmark.ASSUMPTIONS.items():
        assert f"| {name} | " in text
        assert one.source in text
    benchmark.plot(benchmark.Study(days=2, seed=0), tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 10_000
