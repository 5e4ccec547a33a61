"""The layout search: legal layouts, their ranking, and the output of the command. A table replaces the compilers."""

import json

import attrs
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine
from axlearn_plugins_plan.search import compile_layouts, rank
from axlearn_plugins_plan.search.compile_layouts import Cache, plan_words, resolved_request
from axlearn_plugins_plan.search.estimate import HOST_BANDWIDTH, Host, with_host
from axlearn_plugins_plan.search.layout_file import read_layout
from axlearn_plugins_plan.search.machines import machine_names
from axlearn_plugins_plan.search.space import Choice, MeshChoice, microbatches
from axlearn_testing import CommandSuite
from support.needs import require

SMALL = ("--set", "model.decoder.num_layers=2")
REMATS = ["remat:policy=full", "remat:save=[query,key,value]"]


@pytest.fixture(autouse=True)
def few_remats(monkeypatch):
    monkeypatch.setattr(rank, "remat_options", lambda *_: REMATS)


@pytest.fixture(scope="module")
def request_():
    return Request.from_arguments("quickstart", set={"model.decoder.num_layers": 2}, target="h100-8x1")


@pytest.fixture(scope="module")
def space(request_):
    return rank.Space(request_, ())


@pytest.fixture(scope="module")
def ranked(space):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "remat_options", lambda *_: REMATS)
        return space.rank_layouts()


def plan_of(words):
    """Return plausible compiled figures: half a second, or less if activations are saved, on a chip with 79 GiB."""
    text = " ".join(words)
    seconds = 0.4 if "query" in text else 0.5
    return {
        "fits": "steps=8" not in text,
        "argument_bytes": 2**30,
        "temporary_bytes": 2**31 if "query" in text else 2**30,
        "code_bytes": 0,
        "roofline_seconds": {"compute": seconds, "hbm": 0.1, "links": 0.01, "network": 0.0, "serial": 0.5},
        "kernels": [],
        "compile_seconds": 1.0,
    }


@pytest.fixture
def compiler(monkeypatch):
    calls = []

    def run_plan(words, seconds):
        calls.append(list(words))
        return plan_of(words), ""

    monkeypatch.setattr(compile_layouts, "run_plan", run_plan)
    return calls


def run(*words):
    return CliRunner().invoke(cli, ["plan", "quickstart", *SMALL, "--search", *words])


@pytest.mark.slow
def test_every_layout_is_legal_and_resolves(request_, ranked):
    choices = {r.choice.words: r for r in ranked}
    assert len(choices) == len(ranked) > 100
    for row in ranked[:: len(ranked) // 12]:
        config = resolve(resolved_request(request_, row)).check().config
        sizes = config.mesh.sizes(8)  # raises if the sizes do not multiply to the devices
        rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
        assert 8 % (rows * config.learner.accumulate_steps) == 0
        assert config.model.decoder.layer.attention.num_heads % sizes["tensor"] == 0


@pytest.mark.slow
def test_tensor_parallelism_divides_the_heads(ranked):
    sizes = {r.choice.mesh.shape.get("tensor", 1) for r in ranked if r.choice.mesh is not None}
    assert sizes == {1, 2, 4}, "four heads"


@pytest.mark.slow
def test_the_ranking_is_the_same_each_time(space, ranked, monkeypatch):
    monkeypatch.setattr(rank, "remat_options", lambda *_: REMATS)
    assert [r.choice for r in space.rank_layouts()] == [r.choice for r in ranked]
    assert [rank.sort_key(r) for r in ranked] == sorted(rank.sort_key(r) for r in ranked)


@pytest.mark.slow
def test_the_shipped_layout_is_one_of_them(ranked):
    assert sum(r.choice.shipped for r in ranked) == 1


@pytest.mark.slow
def test_memory_follows_what_is_kept_and_how_the_batch_is_cut(ranked):
    mesh = MeshChoice(shape={"fsdp": 4, "tensor": 2})
    totals = {r.choice.words: r.estimate for r in ranked}
    full, partial = (totals[Choice(mesh=mesh, remat=r).words] for r in REMATS)
    assert partial.kept > full.kept
    assert partial.roofline.compute < full.roofline.compute
    halves = totals[Choice(mesh=mesh, remat=REMATS[1], microbatches=2).words]
    assert halves.kept == pytest.approx(partial.kept / 2)


@pytest.mark.slow
def test_arguments_are_those_that_the_program_has(space, ranked):
    import jax

    from axlearn_core.compose import compose
    from axlearn_core.contracts.target import Machine
    from axlearn_plugins_plan.memory import shard_bytes

    base = next(r for r in ranked if r.choice.shipped)
    machine: Machine = space.machine
    program = compose(space.base, jax.devices("cpu")[: machine.devices], machine=machine)
    exact = shard_bytes(program.arguments("train", program.function("train").get_bucket(space.batch)))
    assert base.estimate.arguments == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_the_mathematics_changes_only_when_asked(request_, ranked):
    assert all(r.choice.batch is None and r.choice.optimizer_dtype is None for r in ranked)
    actual = rank.Space(request_, ("batch", "optimizer-precision")).rank_layouts()
    assert {r.choice.batch for r in actual} >= {None, 16, 32}
    assert {r.choice.optimizer_dtype for r in actual} == {None, "bfloat16"}


def test_microbatches_leave_a_row_for_every_device():
    assert microbatches(8, 2) == [1, 2, 4]
    assert microbatches(6, 2) == [1]


def test_values_are_written_as_settings_are_read():
    from axlearn_core.plugins.request import format_value, parse_setting

    value = {"fsdp": 4, "tensor": 2}
    assert parse_setting(f"mesh.shape={format_value(value)}").value == value
    assert parse_setting(f"mesh.rules.activation_embed={format_value([])}").value == []


@pytest.mark.slow
def test_the_words_of_a_row_are_its_config(request_, ranked):
    row = next(r for r in ranked if r.choice.mesh and r.choice.remat and r.choice.microbatches)
    words = plan_words(request_, row)
    parts = {flag: [v for f, v in zip(words[1::2], words[2::2], strict=True) if f == flag] for flag in words[1::2]}
    typed = Request.from_arguments(words[0], with_=parts["--with"], set=parts["--set"], target=parts["--target"][0])
    assert resolve(typed).config == resolve(resolved_request(request_, row)).config


ASKED = [
    ({"with_": ["gradient-accumulation:steps=2"]}, "gradient-accumulation"),
    ({"set": {"learner.accumulate_steps": 2}}, "gradient-accumulation"),
    ({"with_": ["remat:save=[query]"]}, "remat"),
    ({"set": {"model.decoder.stack.remat": None}}, "remat"),
    ({"without": ["remat"]}, "remat"),
    ({"set": {"mesh.shape": {"fsdp": 4, "tensor": 2}}}, "mesh"),
    ({"set": {"mesh.shape": {"fsdp": 4, "tensor": 2}, "mesh.rules.activation_embed": ["tensor"]}}, "stream"),
    ({"with_": ["offload-optimizer"]}, "offload-optimizer"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "part"), ASKED)
def test_what_the_request_sets_is_kept_and_every_layout_stays_legal(options, part):
    base = Request.from_arguments("quickstart", target="h100-8x1", **options)
    messages = []
    space = rank.Space(base, ())
    rows = space.rank_layouts(messages.append)
    assert part in space.fixed
    assert f"set by the request: {', '.join(sorted(space.fixed))}" in messages[0]
    assert sum(r.choice.shipped for r in rows) == 1
    meshes = [r.choice.mesh or MeshChoice(shape={}) for r in rows]
    fixed = {
        "gradient-accumulation": {r.choice.microbatches for r in rows},
        "remat": {r.choice.remat for r in rows},
        "mesh": {tuple(mesh.shape.items()) or None for mesh in meshes if not mesh.stream},
        "stream": {tuple(mesh.stream) for mesh in meshes},
        "offload-optimizer": {r.choice.offload_optimizer for r in rows},
    }  # fmt: skip
    assert fixed[part] in ({None}, {False}, {()})
    for row in rows[:: max(len(rows) // 8, 1)]:
        resolve(resolved_request(base, row)).check()


def test_what_a_run_file_sets_is_kept(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: quickstart\nfeatures:\n- remat: {policy: full}\nset:\n  learner.accumulate_steps: 2\n")
    space = rank.Space(Request.from_arguments(file, target="h100-8x1"), ())
    assert space.fixed == {"remat", "gradient-accumulation"}


@pytest.mark.parametrize(
    ("vary", "options"),
    [("batch", {"set": {"input.batch_size": 16}}), ("optimizer-precision", {"with_": ["optimizer-precision"]})],
)
def test_what_is_set_and_varied_is_an_error(vary, options):
    with pytest.raises(RequestError, match=f"--vary {vary} conflicts with the request"):
        rank.Space(Request.from_arguments("quickstart", target="h100-8x1", **options), (vary,))


def request_with_microbatches(steps):
    rule = {"shape": {"fsdp": 8}, "features": [f"gradient-accumulation:steps={steps}"]}
    return Request.from_arguments(
        "quickstart", target="h100-8x1", set={"mesh.targets": {"h100-8x1": rule}, "input.batch_size": 32}
    )


@pytest.mark.slow
def test_pipelines_take_the_place_of_the_microbatches_of_a_rule():
    pipelines = []
    for steps in (1, 2):
        request = request_with_microbatches(steps)
        rows = [r for r in rank.Space(request, ()).rank_layouts() if r.choice.pipeline]
        pipelines.append({(r.choice.pipeline.feature, str(r.choice.mesh), r.choice.remat, r.seconds) for r in rows})
    assert pipelines[0] == pipelines[1]
    assert {r.choice.pipeline.schedule for r in rows} == {"gpipe", "interleaved", "1f1b"}
    config = resolve(resolved_request(request, rows[0])).check().config
    assert config.learner.accumulate_steps == 1


@pytest.mark.slow
def test_it_prints_the_best_first_and_the_shipped_one_among_them(compiler, tmp_path):
    result = run("--target", "h100-8x1", "--front", "3", "--cache", str(tmp_path / "c"), "--json")
    assert result.exit_code == 0, result.output
    layouts = json.loads(result.stdout)["layouts"]
    assert [x["seconds"] for x in layouts] == sorted(x["seconds"] for x in layouts)
    assert sum(x["shipped"] for x in layouts) == 1
    assert all(x["compiled"] for x in layouts)
    assert {"set", "with", "seconds", "bytes", "compiled", "shipped"} <= set(layouts[0])
    assert "layouts ranked" in result.stderr


@pytest.mark.slow
def test_a_second_search_takes_what_the_first_compiled(compiler, tmp_path):
    words = ("--target", "h100-8x1", "--front", "2", "--cache", str(tmp_path / "c"), "--json")
    first = run(*words)
    count = len(compiler)
    assert run(*words).stdout == first.stdout
    assert len(compiler) == count


@pytest.mark.slow
def test_table_picture_page_and_layout_file(compiler, tmp_path):
    require("matplotlib")
    files = {name: tmp_path / f"best.{name}" for name in ("png", "html", "yaml")}
    result = run(
        "--target", "h100-8x1", "--front", "2", "--cache", str(tmp_path / "c"),
        "--png", str(files["png"]), "--html", str(files["html"]), "--layout-out", str(files["yaml"]),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "shipped" in result.stdout
    assert "best layout:" in result.stdout
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["html"].read_text()
    layout = read_layout(files["yaml"])
    assert layout.target == "h100-8x1"
    assert resolve("quickstart", set={"model.decoder.num_layers": 2}, layout=files["yaml"]).machine.name == "h100-8x1"
    with pytest.raises(RequestError, match="layout for a different model"):
        resolve("quickstart", layout=files["yaml"])


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_no_best(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_layouts, "run_plan", lambda words, _: (plan_of(words) | {"fits": False}, ""))
    result = run("--target", "h100-8x1", "--front", "2", "--cache", str(tmp_path))
    assert result.exit_code == 1
    assert "does not fit" in result.stdout


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again(compiler, tmp_path, request_, ranked):
    cache = Cache(tmp_path)
    path = cache.path(request_, ranked[0])
    path.write_text("{")
    assert cache.read(path) is None


@pytest.mark.slow_cases("words8-no layout of quickstart is legal")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "cpu-8"), "the target 'cpu' lacks the hardware figures"),
        ((), "a search needs a target machine"),
        (("--target", "h100-8x1", "--budget", "0"), "--budget expects a positive number"),
        (("--target", "h100-8x1", "--budget", "soon"), "--budget expects a positive number"),
        (("--target", "h100-8x1", "--chips", "9"), "--chips expects a range A..B"),
        (("--target", "h100-8x1", "--chips", "3..3"), "no machine has a size in the range"),
        (("--target", "h100-8x1", "--vary", "bacth"), "bacth"),
        (("--target", "h100-8x1", "--function", "decode"), "--function is an option of `axlearn plan`"),
        (("--target", "h100-8x64", "--set", "input.batch_size=3"), "no layout of quickstart is legal"),
    ],
)
def test_what_is_asked_wrongly_is_one_error(words, message, tmp_path):
    result = run(*words, "--cache", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.slow
def test_a_budget_too_small_for_one_compilation_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_layouts, "run_plan", lambda *_: (None, compile_layouts.TIMEOUT))
    result = run("--target", "h100-8x1", "--cache", str(tmp_path))
    assert result.exit_code == 2
    assert "the budget is too small to compile one layout" in result.stderr


def test_what_says_more_to_the_search_needs_it():
    result = CliRunner().invoke(cli, ["plan", "quickstart", "--target", "h100-8x1", "--budget", "3"])
    assert result.exit_code == 2
    assert "--budget is an option of `axlearn plan search`" in result.stderr


def test_machines_by_chips():
    assert machine_names("h100-8x1,tpu-v5p-8", "8..16") == ["h100-8x1", "h100-8x2", "tpu-v5p-16", "tpu-v5p-32"]
    assert machine_names("h100-8x1,h100-8x1", None) == ["h100-8x1"]
    assert find_machine("tpu-v5p-32").chips == 16


@pytest.mark.slow
class TestSearchCommand(CommandSuite):
    name = "plan-search"
    arguments = (
        "quickstart",
        *SMALL,
        "--target",
        "h100-8x1",
        "--front",
        "1",
        "--json",
        "--cache",
        "runs/layouts",
    )


@pytest.fixture(scope="module")
def on_tpus():
    batch = {"input.batch_size": 64}
    return rank.Space(Request.from_arguments("quickstart", target="tpu-v5p-16", set=batch), ())


@pytest.mark.slow
def test_activations_of_stages_stay_on_the_device(on_tpus, monkeypatch):
    monkeypatch.setattr(
        rank, "remat_options", lambda *_: ["remat:offload=[attention_out]", "remat:save=[attention_out]"]
    )
    rows = on_tpus.rank_layouts()
    kept_on_host = [r for r in rows if "remat:offload" in (r.choice.remat or "")]
    assert kept_on_host
    assert any(r.choice.pipeline for r in rows)
    assert not any(r.choice.pipeline for r in kept_on_host)


@pytest.mark.slow
def test_memory_on_tpus_is_that_of_phases(on_tpus):
    rows = on_tpus.rank_layouts()
    assert {r.choice.pipeline.schedule for r in rows if r.choice.pipeline} == {"gpipe", "interleaved", "1f1b"}
    for row in rows:
        assert sum(row.estimate.columns.values()) == pytest.approx(row.estimate.temporaries)
        in_update = row.choice.offload_optimizer and "layer" not in row.estimate.columns
        assert in_update or row.estimate.columns["rounded"] > 0, "layers compute in bfloat16 with float32 parameters"


@pytest.mark.slow
def test_an_optimizer_that_the_request_offloads_is_offloaded(on_tpus):
    request = Request.from_arguments(
        "quickstart", target="tpu-v5p-16", set={"input.batch_size": 64}, with_=["offload-optimizer"]
    )
    (requested,) = [r for r in rank.Space(request, ()).rank_layouts() if r.choice.shipped]
    (chosen,) = [r for r in on_tpus.rank_layouts() if r.choice.words == ("--with", "offload-optimizer")]
    assert requested.estimate == chosen.estimate


def test_activations_move_to_the_host_and_back():
    def seconds(activations, optimizer=0.0):
        return with_host(3.0, Host(activations=activations * HOST_BANDWIDTH, optimizer=optimizer * HOST_BANDWIDTH))

    assert seconds(2.0) == 3.0, "one second each way, no longer than either pass"
    assert seconds(3.0) == 1.5 + 2.0, "the forward pass waits"
    assert seconds(8.0) == 4.0 + 4.0
    assert seconds(0.0, 2.0) == 5.0, "the transfer of the optimizer state does not overlap"


@pytest.mark.slow
def test_what_the_hosts_memory_cannot_hold_is_not_proposed(request_, ranked):
    space = rank.Space(request_, ())
    offloaded = [r for r in ranked if r.choice.offload_optimizer]
    assert offloaded
    room = max(r.estimate.host.optimizer for r in offloaded) / 4  # enough for half of the largest optimizer state
    space.machine = attrs.evolve(space.machine, target=attrs.evolve(space.machine.target, host_bytes=room / 0.8))
    fewer = [r for r in space.rank_layouts() if r.choice.offload_optimizer]
    assert 0 < len(fewer) < len(offloaded)
    assert all(r.estimate.host.optimizer / 2 <= room for r in fewer)
