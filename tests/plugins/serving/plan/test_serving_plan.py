"""`axlearn plan --serve`: the plan of a server on an absent machine."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.compose.devices import configure_devices
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_serving.plan import steps as plan_steps
from axlearn_plugins_serving.plan.serving_plan import ServingPlan, cast_to_compute_dtype, plan_model
from axlearn_plugins_serving.plan.steps import CompiledStep, Steps
from axlearn_plugins_serving.runner import ModelRunner
from support import extended_models

HEADS = ["--set", "model.decoder.layer.attention.num_heads=8"]
SMALL = ["--set", "model.decoder.num_layers=1", "--set", "serving.runner.max_context=128"]
SMALL += ["--set", "serving.runner.max_rows=4", "--set", "serving.runner.chunk_buckets=[]"]
SIZES = {"max_rows": 4, "max_context": 128, "chunk_buckets": (), "row_buckets": ()}


def plan(*words):
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


@pytest.mark.slow
def test_what_eight_devices_hold():
    result = plan("quickstart", "--serve", "--target", "cpu-8", "--json", *SMALL, *HEADS)
    assert result.exit_code == 0, result.output
    actual = json.loads(result.stdout)
    assert actual["mesh"] == {"tensor": 8}
    assert actual["fits"]
    assert actual["cache_tokens"] == 4 * 128
    # keys and values of 1 of 8 heads of 16 float32 numbers
    assert actual["cache_bytes_per_token"] == 2 * 16 * 4
    assert actual["cache_bytes"] == 512 * 128
    assert actual["weight_bytes"] < actual["parameters"] * 4 / 3  # sharded, except for the norms
    assert actual["tpot_seconds_alone"] is None  # the peak of this target is unknown
    alone, full = actual["steps"]["alone"], actual["steps"]["full"]
    assert full["requests"] == 4
    cache = actual["cache_bytes_per_token"]
    assert full["hbm_traffic_bytes"] - alone["hbm_traffic_bytes"] == 3 * (actual["context"] + 1) * cache
    # an all-reduce after attention and one after the feed-forward layer: 2 x 7 / 8 of 128 numbers of each of 4 rows
    assert full["link_bytes"] >= 2 * (2 * 7 / 8) * 4 * 128 * 4
    assert actual["layers_compiled"] is None


@pytest.mark.slow
def test_equal_layers_are_not_all_compiled(monkeypatch):
    cfg = patch(ModelRunner.Config(), SIZES)
    machine = find_machine("cpu-8")
    configure_devices(machine)
    settings = {"model.decoder.num_layers": 6, "model.decoder.hidden_dim": 64}
    settings |= {"model.decoder.layer.attention.num_heads": 8}
    model = resolve("quickstart", set=settings).config.model
    steps = Steps(cfg, model, machine, Mesh(shape={"tensor": 8}))
    assert steps.layers_compiled == (2, 3)
    monkeypatch.setattr(plan_steps, "DEPTHS", (8, 9))
    whole = Steps(cfg, model, machine, Mesh(shape={"tensor": 8}))
    assert whole.layers_compiled is None
    for bucket in (whole.buckets[0], whole.buckets[-1]):
        a, b = (s.plan(bucket, 1, bucket.chunks * bucket.chunk, 64) for s in (steps, whole))
        assert (a.flops, a.traffic) == (b.flops, b.traffic)
        assert a.compiled.links == b.compiled.links
        assert a.compiled.temporaries == pytest.approx(b.compiled.temporaries, rel=0.05)


@pytest.mark.slow
def test_it_does_not_fit():
    blocks = ["--set", "serving.runner.num_blocks=60000000"]
    result = plan("serve", "quickstart", "--verbose", "--target", "cpu-8", *SMALL, *HEADS, *blocks)
    assert result.exit_code == 1
    assert "does not fit: " in result.stdout
    assert "--set serving.runner.num_blocks=" in result.stdout
    assert "which uses the remaining memory" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100-4x1", "tpu-v6e-4"])
def test_accelerators_that_are_not_here(target):
    machine = find_machine(target)
    configure_devices(machine)
    sizes = {
        "model.decoder.num_layers": 2,
        "model.decoder.hidden_dim": 512,
        "model.decoder.layer.attention.num_heads": 8,
    }
    sizes |= {"model.decoder.layer.attention.num_kv_heads": 4, "model.decoder.layer.attention.head_dim": 128}
    model = resolve("llama2-7b", target=target, set=sizes).config.model
    model, notes = cast_to_compute_dtype(model)
    assert "weights are assumed to be in bfloat16" in notes[0]
    figures = plan_model(model, machine, title="small", notes=notes)
    assert figures.fits
    assert figures.dtype == "bfloat16"
    assert figures.token_bytes == 2 * 2 * 128 * 2  # two layers, keys and values of one head
    hardware = machine.target
    assert figures.single.roofline.step == pytest.approx(figures.single.traffic / hardware.hbm_bandwidth)
    room = hardware.hbm_bytes - figures.weights - figures.tables - figures.working_bytes
    assert figures.most_tokens == pytest.approx(room / figures.token_bytes, abs=64)
    kernels = {c.op.name: c.name for c in figures.kernels}
    assert kernels["paged_attention"] == ("ragged-paged" if target.startswith("tpu") else "pallas-triton")


@pytest.mark.slow
def test_programs_for_devices_that_are_not_here(tmp_path):
    exported = tmp_path / "programs"
    result = plan("quickstart", "--serve", "--target", "h100-1x1", *SMALL, "--export", exported)
    assert result.exit_code == 0, result.output
    index = json.loads((exported / "executables.json").read_text())
    assert index["devices"] == [["gpu", "NVIDIA H100 80GB HBM3", 0, []]]
    assert {f["function"] for f in index["functions"]} >= {"serve", "serve_cache", "serve_weights"}


@pytest.mark.slow_cases("words0-cannot be served because it does not generate tokens")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["vit-tiny", "--target", "cpu-8"], "cannot be served because it does not generate tokens"),
        (["quickstart"], "a plan needs a target machine"),
        (
            ["quickstart", "--target", "cpu-8", "--function", "decode"],
            "--function is an option of `axlearn plan`, not of `axlearn plan serve`",
        ),
        (["quickstart", "--target", "cpu-8", "--set", "serving.runner.max_row=2"], "max_rows"),
        (["quickstart", "--target", "cpu-8", *SMALL], "is not divisible by the mesh axes tensor"),
        (["quickstart", "--target", "cpu-8", "--set", "serving.tensor_parallel=2"], "and 8 devices of cpu-8"),
        (["quickstart", "--target", "cpu-8", "--set", "serving.runner.mode=exact"], "mode"),
        (["quickstart", "--target", "cpu-8", "--set", "serving.runner.num_blocks=90000000"], "in 32 bits"),
    ],
)
def test_requests_that_are_wrong(words, says):
    result = plan(*words, "--serve")
    assert result.exit_code == 2, result.output
    assert says in result.stderr


def test_planning_needs_the_package_that_plans(monkeypatch):
    find_spec = importlib.util.find_spec
    missing = "axlearn_plugins_plan"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == missing else find_spec(name, *more)
    )
    for words in (["serve"], ["search", "serve"]):
        result = plan(*words, "quickstart", "--target", "h100-1x1")
        assert result.exit_code == 2
        assert "pip install 'axlearn-plugins-serving[plan]'" in result.stderr


@pytest.mark.slow
def test_a_server_does_not_import_the_package_that_plans():
    code = (
        "import sys, axlearn_plugins_serving.server.command, axlearn_plugins_serving.local_engine\n"
        "import axlearn_plugins_serving.open_engine, axlearn_plugins_serving.programs\n"
        "assert not [m for m in sys.modules if m.startswith(('axlearn_plugins_plan', 'axlearn_plugins_serving.plan'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_compiler_refuses_does_not_fit():
    two, three = (
        CompiledStep(temporaries=size, code=0.0, links=None, network=None, out_of_memory=refused)
        for size, refused in ((9e9, False), (8.5e9, True))
    )
    step = SimpleNamespace(compiled=two.extrapolate(three, 77))
    assert step.compiled.temporaries == 0.0, "by a line through an upper bound and a figure below it"
    assert not ServingPlan.fits.fget(SimpleNamespace(steps=(step,), capacity=1e12, total=0.0))


@pytest.mark.slow
def test_each_kind_of_layer_counts_as_often_as_it_occurs():
    machine = find_machine("cpu-8")
    configure_devices(machine)
    settings = {"model.decoder.num_layers": 4, "model.decoder.hidden_dim": 64}
    settings |= {"model.decoder.layer.attention.num_heads": 8}
    small = resolve("quickstart", set=settings).config
    plain, windows, hybrid = (
        Steps(
            patch(ModelRunner.Config(), SIZES),
            resolve(small, with_=features).config.model,
            machine,
            Mesh(shape={"tensor": 8}),
        )
        for features in ([], ["interleave:every=2,window=9"], ["gated-delta-net:attention_every=4"])
    )
    whole, local, mixed = (steps.plan(steps.buckets[-1], 4, 0, 64) for steps in (plain, windows, hybrid))
    head, token = 8 * 8, plain.token_bytes / 4
    attention = 4 * 65 * head * 4  # four requests, each with 64 keys and its own
    assert whole.flops - local.flops == 2 * (attention - 4 * 9 * head * 4)
    assert whole.traffic - local.traffic == 4 * 2 * (64 - 8) * token
    assert sum(hybrid._mixing_ops().values()) == 4
    assert hybrid.token_bytes == token
    assert (plain.states, plain.state_bytes) == (0, 0)
    slots = hybrid.cfg.max_rows + hybrid.cfg.total_snapshots
    assert hybrid.states == slots * hybrid.state_bytes > 0
    assert mixed.flops > 0


@pytest.mark.slow
def test_layers_that_share_values_count_as_the_largest_op():
    machine = find_machine("cpu-8")
    configure_devices(machine)
    settings = {"model.decoder.num_layers": 3, "model.decoder.hidden_dim": 64}
    settings |= {"model.decoder.layer.attention.num_heads": 8}
    model = extended_models.extended(resolve("quickstart", set=settings).config.model)
    steps = Steps(patch(ModelRunner.Config(), SIZES), model, machine, Mesh(shape={"tensor": 8}))
    assert [*steps._mixing_ops().values()] == [3]
