"""The markers that split a test's cases between the default suite and the slow one, and the limit of processor time."""

import sys
from pathlib import Path

import pytest

from support.processor_time import INTERVAL, STANDARD, SpeedMeter, standard_seconds

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.style

CONFTEST = Path(__file__).with_name("conftest.py")
FUNCTION = """
    import pytest

    @pytest.mark.{marker}
    @pytest.mark.parametrize("size", [1, 2, 30])
    def test_size(size):
        pass
"""
CLASS = """
    import pytest

    @pytest.mark.{marker}
    class TestPart:
        def test_quick(self):
            pass

        @pytest.mark.parametrize("size", [1, 2])
        def test_size(self, size):
            pass
"""


@pytest.fixture
def collect(pytester, monkeypatch):
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    fast_cases\n    slow_cases\n")

    def run(source, *arguments):
        pytester.makepyfile(test_it=source)
        # In one process, NumPy can be imported only once, so no plugin may import it here.
        without = [word for name in ("jaxtyping", "schemathesis", "xdist") for word in ("-p", f"no:{name}")]
        result = pytester.runpytest_inprocess(*without, "-m", "not slow", "-v", *arguments)
        return [line.split("::", 1)[1].split(" ")[0] for line in result.outlines if "PASSED" in line], result

    return run


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ('fast_cases("2")', ["test_size[2]"]),
        ('fast_cases("1", "3*")', ["test_size[1]", "test_size[30]"]),
        ('slow_cases("2")', ["test_size[1]", "test_size[30]"]),
        ("slow", []),
    ],
)
def test_cases_of_a_function(collect, marker, expected):
    assert collect(FUNCTION.format(marker=marker))[0] == expected


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ('slow_cases("test_size")', ["TestPart::test_quick"]),
        ('slow_cases("test_size[1*]")', ["TestPart::test_quick", "TestPart::test_size[2]"]),
        ('slow_cases("test_size[1]", "test_quick")', ["TestPart::test_size[2]"]),
    ],
)
def test_tests_of_a_class(collect, marker, expected):
    assert collect(CLASS.format(marker=marker))[0] == expected


def test_a_pattern_that_matches_no_case_is_an_error(collect):
    passed, result = collect(FUNCTION.format(marker='fast_cases("1", "4")'))
    assert (passed, result.ret) == ([], pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["*test_it.py::test_size: fast_cases names no case '4'*"])


def test_one_case_by_its_id_runs_without_the_others(collect):
    assert collect(FUNCTION.format(marker='fast_cases("1", "2")'), "test_it.py::test_size[2]")[0] == ["test_size[2]"]


@pytest.mark.parametrize(("seconds", "code"), [("1e9", pytest.ExitCode.OK), ("0", pytest.ExitCode.TESTS_FAILED)])
def test_the_suite_fails_above_the_limit_of_processor_time(collect, monkeypatch, seconds, code):
    monkeypatch.setenv("AXLEARN_TESTS_PROCESSOR_SECONDS", seconds)
    result = collect(FUNCTION.format(marker='fast_cases("1")'))[1]
    assert result.ret == code
    result.stdout.fnmatch_lines(["processor time: * s, * s at the standard speed"])


def test_processor_time_is_scaled_by_the_mean_speed():
    samples = [STANDARD, STANDARD, 2 * STANDARD, 2 * STANDARD]  # half of the time at full speed, half at half speed
    assert standard_seconds(80, samples) == pytest.approx(60)
    assert standard_seconds(80, []) == 80


def test_the_meter_probes_at_intervals_of_processor_time(monkeypatch):
    now = iter([0.0, 0.0, INTERVAL / 2, INTERVAL, 1.5 * INTERVAL, 5 * INTERVAL])
    monkeypatch.setattr("time.process_time", lambda: next(now))
    monkeypatch.setattr("support.processor_time.probe", lambda: 0.1)
    monkeypatch.setitem(sys.modules, "jax", None)
    meter = SpeedMeter()
    counts = []
    for _ in range(5):
        meter.sample()
        counts.append(len(meter.samples))
    assert counts == [1, 1, 2, 2, 3]
