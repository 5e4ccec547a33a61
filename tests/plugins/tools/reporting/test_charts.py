"""The arithmetic of the charts."""

import pytest

from axlearn_plugins_tools.reporting.charts import Series, histogram, line_chart, log_ticks, short, smooth, thin, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.13, 0.41, [0.2, 0.3, 0.4]), (-3, 3, [-2, 0, 2]), (5, 5, [5])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_logarithmic_ticks():
    assert log_ticks(1.3, 8.2) == pytest.approx([1.5, 2, 2.5, 4, 5, 8])
    actual = log_ticks(0.001, 5000)
    assert all(0.001 <= v <= 5000 for v in actual)
    assert 5 <= len(actual) <= 10
    assert log_ticks(1.01, 1.02) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.38512, "1.385"), (0, "0"), (12_345, "12.35k"), (2_612_345, "2.612M"), (3e-4, "3.0e-04"), (-1e9, "-1G")],
)
def test_short(value, text):
    assert short(value) == text


def test_smoothing_keeps_a_slope_and_a_level():
    slope = [(i, 10.0 - i) for i in range(50)]
    assert [y for _, y in smooth(slope, 11)[:45]] == pytest.approx([y for _, y in slope[:45]])
    assert smooth([(i, 3.0) for i in range(7)], 100) == [(i, 3.0) for i in range(7)]
    assert smooth([(0, 1.0)], 0) == [(0, 1.0)]


def test_thinning_keeps_extremes_and_order():
    values = [(i, float(i % 7)) for i in range(5000)]
    values[777] = (777, 99.0)
    actual = thin(values, 100)
    assert len(actual) <= 100
    assert (777, 99.0) in actual
    assert actual == sorted(actual)
    assert thin(values[:50], 100) == values[:50]


def test_charts_of_little_or_odd_data():
    assert line_chart("none", [Series(label="a", style="main", points=[])], height=200) == ""
    one = line_chart("one", [Series(label="a", style="main", points=[(3, 2.0)])], height=200)
    assert "<circle" in one
    flat = line_chart("flat", [Series(label="a", style="main", points=[(1, 0.0), (2, 0.0)])], height=200, log=True)
    assert "logarithmic" not in flat  # zero has no logarithm
    bars = histogram("h", [0.5, 0.5], [("p50", 0.5), ("p99", 0.5)], str)
    assert bars.count('class="bar"') == 8
