"""The search over layouts of a server: candidates, ranking and errors."""

import json

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_serving.plan import layout_search
from axlearn_plugins_serving.plan.layout_search import ServingLayout, ServingRow, list_layouts
from support.needs import require

SMALL = (
    "model.decoder.num_layers=1",
    "model.decoder.hidden_dim=64",
    "model.decoder.layer.feed_forward.hidden_dim=64",
    "serving.runner.max_context=128",
)


def run(*words):
    return CliRunner().invoke(cli, ["plan", "quickstart", "--serve", "--search", *words])


def test_replicas_fill_the_machine_and_the_default_layout_comes_first():
    machine = find_machine("h100-8x2")
    rows = list_layouts(machine, 16, None, ())
    assert rows[0] == [ServingLayout(replicas=1, machine=machine, rows=16, cache_dtype=None, shipped=True)]
    rest = [layout for chain in rows[1:] for layout in chain]
    assert {layout.machine.devices for layout in rest} == {1, 2, 4, 8}, "products are shared within a host"
    assert all(layout.replicas * layout.machine.devices == 16 for layout in rest)
    assert all([at.rows for at in chain] == sorted(at.rows for at in chain) for chain in rows)
    assert len(rest) == len({at.words for at in rest})


def test_what_ships_is_not_tried_twice():
    machine = find_machine("h100-4x1")
    rows = [at for chain in list_layouts(machine, 16, None, ()) for at in chain]
    assert sum(at.rows == 16 and at.machine == machine for at in rows) == 1


def test_the_cache_changes_only_when_asked_for():
    machine = find_machine("h100-1x1")
    dtypes = {at.cache_dtype for chain in list_layouts(machine, 16, None, ("cache-dtype",)) for at in chain}
    assert dtypes == {None, "int8", "float8_e4m3fn"}
    assert {at.cache_dtype for chain in list_layouts(machine, 16, "int8", ()) for at in chain} == {"int8"}


def row(tokens, tpot, fits=True, shipped=False):
    layout = ServingLayout(replicas=1, machine=find_machine("h100-1x1"), rows=4, cache_dtype=None, shipped=shipped)
    return ServingRow(layout=layout, tpot=tpot, tokens_per_second=tokens, bytes=1.0, fits=fits)


def test_the_front_has_what_nothing_is_better_than_in_both():
    best, quick, worse, big = row(100, 3.0), row(50, 1.0), row(40, 2.0), row(900, 0.1, fits=False)
    shipped = row(1, 9.0, fits=False, shipped=True)
    result = layout_search._result([worse, big, best, quick, shipped], (), "")
    assert list(result.rows) == [best, quick, worse, shipped], "what does not fit is left out, but for what ships"
    assert list(result.front) == [best, quick]


def test_requests_are_doubled_until_they_no_longer_fit(monkeypatch):
    tried = []

    def planned(_request, _engine, layout, _failures):
        tried.append((layout.machine.devices, layout.rows))
        return ServingRow(layout=layout, tpot=1.0, tokens_per_second=1.0, bytes=1.0, fits=layout.rows <= 16)

    monkeypatch.setattr(layout_search, "_plan_layout", planned)
    monkeypatch.setattr(layout_search, "configure_devices", lambda machine: None)
    from axlearn_core.plugins.request import Request

    result = layout_search.search_serving(Request.from_arguments("quickstart"), find_machine("h100-2x1"), (), 100.0)
    assert tried == [(2, 16), *((1, n) for n in (4, 8, 16, 32)), *((2, n) for n in (4, 8, 32))]
    assert all(r.fits for r in result.rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "cpu-8"], "lacks the hardware figures needed to rank layouts"),
        ([], "a search needs a target machine"),
        (["--target", "h100-1x1,h100-8x1"], "needs exactly one machine"),
        (["--target", "tpu-v5p-8", "--chips", "8..32"], "needs exactly one machine"),
        (["--target", "h100-1x1", "--png", "x.png"], "--png is an option of `axlearn plan search`"),
        (["--target", "h100-1x1", "--vary", "batch"], "part of a layout that --vary accepts"),
        (["--target", "h100-1x1", "--function", "decode"], "--function is an option of `axlearn plan`"),
        (["--target", "h100-1x1", "--export", "x"], "--export is an option of `axlearn plan serve`"),
        (["--target", "h100-1x1", "--budget", "0"], "--budget expects a positive number"),
    ],
)
def test_what_is_refused(words, message):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize(
    "words",
    [["search", "serve", "quickstart"], ["search", "quickstart", "--serve"], ["quickstart", "--search", "--serve"]],
)
def test_every_spelling_is_the_same_search(words):
    result = CliRunner().invoke(cli, ["plan", *words, "--target", "h100-1x1,h100-8x1"])
    assert result.exit_code == 2
    assert "a search for serving needs exactly one machine" in result.stderr


@pytest.mark.slow
def test_layouts_are_compiled_and_compared():
    require("jax_plugins.xla_cuda12")
    settings = [w for text in SMALL for w in ("--set", text)]
    result = run("--target", "h100-1x1", "--budget", "0.2", "--json", *settings)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["layouts"]
    assert [at for at in rows if at["shipped"]]
    assert rows[0]["tokens_per_second"] == max(at["tokens_per_second"] for at in rows)
    assert all(at["fits"] and at["tpot_seconds"] > 0 for at in rows)
