"""Plans of real configs, with figures checked against computations by hand."""

import json

import attrs
import jax
import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import use
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.largest_batch import LargestBatch
from axlearn_plugins_plan.memory import parse_out_of_memory
from axlearn_plugins_plan.plan import add_largest_batch, make_plan
from axlearn_plugins_plan.remedies import remedies
from axlearn_plugins_plan.render import as_json, seconds, sections, text
from axlearn_plugins_plan.roofline import peak, roofline
from axlearn_plugins_transformer.kernels.masks import Causal, Segments, SlidingWindow, visible_pairs
from support.needs import require

SMALL = (
    "model.decoder.num_layers=2",
    "input.batch_size=16",
    "input.sequence_length=256",
    "learner.optimizer={type: adamw, learning_rate: 0.01}",
)
WIDTH, HIDDEN, VOCAB, LAYERS, ROWS, LENGTH = 128, 384, 2048, 2, 16, 256


@pytest.fixture(scope="module")
def plan():
    """Return the plan of two quickstart layers on eight virtual devices."""
    return make_plan(resolve("quickstart", set=SMALL, target="cpu-8", with_=["remat:save=[query,mlp_up]"]))


@pytest.mark.slow
def test_flops_by_hand(plan):
    tokens = ROWS * LENGTH
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) + WIDTH * VOCAB
    pairs = LAYERS * 2 * WIDTH * LENGTH  # scores and values, for each query
    assert plan.flops.full == 3 * 2 * tokens * (matrices + pairs)
    assert plan.flops.causal == 3 * 2 * tokens * (matrices + pairs / 2)
    # The step runs three passes, and recomputes most of the forward pass of the layers.
    assert plan.flops.causal < sum(plan.executed_flops.values()) < 4 / 3 * plan.flops.full
    assert set(plan.executed_flops) == {"float32"}


def test_memory_and_collectives_by_hand(plan):
    # An eighth of the parameters and of two moments (including norms), and the batch of five arrays.
    batch = 5 * 4 * ROWS * LENGTH // 8
    assert plan.memory.arguments == pytest.approx(3 * 4 * plan.parameters / 8 + batch, rel=0.01)
    assert plan.memory.fits
    assert set(plan.collective_bytes) == {"fsdp"}
    # Every parameter is gathered at least once, with seven eighths from other devices, and its gradient is summed.
    assert plan.collective_bytes["fsdp"] > 2 * 4 * plan.parameters * 7 / 8
    assert plan.roofline.step is None  # CPUs have no figures


def test_tags(plan):
    results = {t.name: t for t in plan.tags}
    assert {n: t.kept for n, t in results.items() if t.kept != "recomputed"} == {"query": "saved", "mlp_up": "saved"}
    assert results["query"].bytes == LAYERS * ROWS * LENGTH * WIDTH * 4 / 8
    assert results["mlp_up"].bytes == LAYERS * ROWS * LENGTH * HIDDEN * 4 / 8
    assert results["mlp_up"].flops == LAYERS * 2 * ROWS * LENGTH * WIDTH * HIDDEN / 8
    assert results["mlp_hidden"].flops == 0  # no matmuls


def test_a_plan_of_another_function():
    decode = make_plan(resolve("quickstart", set=SMALL, target="cpu-8"), "decode")
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) + WIDTH * VOCAB
    assert decode.flops.full == 2 * (matrices + LAYERS * 2 * WIDTH * LENGTH)  # one token against a full cache
    assert decode.tags == ()
    assert decode.gradient_bytes == 0
    cache = LAYERS * 2 * LENGTH * WIDTH * 4
    assert decode.memory.arguments == pytest.approx(4 * decode.parameters / 8 + cache, rel=0.05)
    assert text(decode).startswith("decode of quickstart on cpu-8")
    assert "time of one call" in text(decode)
    assert as_json(decode)["function"] == "decode"
    assert as_json(decode)["tokens_per_step"] is None
    evaluate = make_plan(resolve("quickstart", set=SMALL, target="cpu-8"), "evaluate")
    assert evaluate.tokens == ROWS * LENGTH
    assert evaluate.flops.full == 2 * ROWS * LENGTH * (matrices + LAYERS * 2 * WIDTH * LENGTH)


def test_it_is_printed(plan):
    report, fields = text(plan), as_json(plan)
    assert "fits: " in report
    assert "fsdp=8" in report
    assert "xla-blocked" in report
    needed = "fits argument_bytes temporary_bytes hbm_bytes model_flops roofline_step_seconds roofline_mfu"
    assert {*needed.split(), "collective_bytes", "kernels", "compile_seconds"} <= set(json.loads(json.dumps(fields)))
    attention = next(k for k in fields["kernels"] if k["name"] == "attention")
    assert attention["kernel"] == "xla-blocked"
    assert "priority" in attention["rejected"]["xla"]


def test_the_head_shows_the_batch_and_who_set_it(plan):
    first, second, empty = text(plan).splitlines()[:3]
    assert first == "quickstart on cpu-8: 8 chips, 950,912 parameters"
    assert second == "16 rows of 256 tokens (4,096 tokens) per step: input.batch_size, set by --set input.batch_size=16"
    assert empty == ""
    micro = text(attrs.evolve(plan, accumulate_steps=2, batch="input.batch_size, the value of the experiment"))
    assert micro.splitlines()[1].endswith("per step in 2 microbatches: input.batch_size, the value of the experiment")
    adapted = attrs.evolve(plan, trained=1000)
    assert text(adapted).splitlines()[0].endswith("950,912 parameters, 1,000 trained")
    assert "gradients of frozen parameters do not count" in text(at_peak(adapted, 1e9))
    assert "frozen" not in text(at_peak(plan, 1e9))
    assert {k: as_json(plan)[k] for k in ("rows_per_step", "tokens_per_step", "trained_parameters")} == {
        "rows_per_step": 16,
        "tokens_per_step": 4096,
        "trained_parameters": 950_912,
    }


def test_kernels_that_were_not_asked_are_only_listed_on_request(plan):
    for line in ("not xla: not tried", "not cudnn: runs on gpu, not on cpu"):
        assert line not in text(plan)
        assert line in text(plan, verbose=True)
    choice = plan.kernels[0]
    refused = attrs.evolve(plan, kernels=(attrs.evolve(choice, rejected=(("fast", "the head size is odd"),)),))
    assert "not fast: the head size is odd" in text(refused)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0123, "12.3 ms"), (1.5, "1.5 s"), (119, "119 s"), (1034, "17.2 min"), (9000, "2.5 h"), (400_000, "4.63 days")],
)
def test_durations_have_readable_units(value, expected):
    assert seconds(value) == expected


def test_speed_is_shown_beside_both_times(plan):
    target = attrs.evolve(plan.machine.target, name="h100", platform="gpu", peak_flops={"bfloat16": 1e12})
    timed = attrs.evolve(at_peak(plan, 8e12), machine=attrs.evolve(plan.machine, target=target))
    assert timed.roofline.step == 1.0
    lines = {line.split()[0].rstrip("0123456789."): line for line in text(timed).splitlines() if line.startswith("  ")}
    assert ", 4,096 tokens/s" in lines["step"]
    assert lines["predicted"].count("tokens/s") == 1


def test_the_largest_batch_is_shown(plan):
    largest = LargestBatch(rows=8, bytes=2**30, too_large=16, too_large_bytes=2**31, compiles=3)
    report = text(attrs.evolve(plan, largest_batch=largest))
    assert "largest batch that fits: 8 rows (2,048 tokens), 1 GiB; 16 rows (4,096 tokens) do not fit" in report
    assert "--set input.batch_size=8" in report
    none = attrs.evolve(largest, rows=None, bytes=None)
    assert "not even the smallest batch fits: 16 rows" in text(attrs.evolve(plan, largest_batch=none))
    assert as_json(attrs.evolve(plan, largest_batch=largest))["largest_batch"]["rows"] == 8
    assert as_json(plan)["largest_batch"] is None


def test_microbatches_are_as_large_as_the_largest_batch_that_fits(plan):
    memory = attrs.evolve(plan.memory, arguments=1000, temporaries=64_000, code=0, capacity=9_500)
    largest = LargestBatch(rows=40, bytes=9_000, too_large=48, too_large_bytes=10_600, compiles=3)
    tight = attrs.evolve(plan, rows=320, memory=memory, gradient_bytes=100, largest_batch=largest)

    def words(plan):
        return [r.words for r in remedies(plan, frozenset({"gradient-accumulation"})) if "steps=" in r.words]

    assert words(tight) == ["--with gradient-accumulation:steps=8"]
    # The buffer of the gradients leaves room for 37 rows, of which 32 divide the batch and the mesh.
    assert words(attrs.evolve(tight, gradient_bytes=1000)) == ["--with gradient-accumulation:steps=10"]
    in_two = attrs.evolve(tight, accumulate_steps=2, largest_batch=attrs.evolve(largest, rows=80))
    assert words(in_two) == ["--with gradient-accumulation:steps=8"]


def test_microbatches_are_smaller_if_double_buffering_keeps_two_of_them(plan):
    memory = attrs.evolve(plan.memory, arguments=1000, temporaries=64_000, code=0, capacity=9_500)
    largest = LargestBatch(rows=40, bytes=9_000, too_large=48, too_large_bytes=10_600, compiles=3)
    options = {"xla_gpu_enable_while_loop_double_buffering": True}
    tight = attrs.evolve(
        plan, rows=320, memory=memory, gradient_bytes=100, largest_batch=largest, compiler_options=options
    )

    def words(plan):
        return [r.words for r in remedies(plan, frozenset({"gradient-accumulation"})) if "steps=" in r.words]

    # The measured batch had no loop over microbatches, so its memory is that of one microbatch.
    assert words(tight) == ["--with gradient-accumulation:steps=20"]
    # A batch that was measured in microbatches already has both buffers.
    in_two = attrs.evolve(tight, accumulate_steps=2, largest_batch=attrs.evolve(largest, rows=80))
    assert words(in_two) == ["--with gradient-accumulation:steps=8"]


def test_the_search_compiles_batches_that_the_mesh_divides(plan, monkeypatch):
    """The memory of a compiled batch grows with its rows, and the plan gets the result."""
    import axlearn_plugins_plan.plan as module

    rows = []

    def compiled(program, function, bucket, machine):
        rows.append(bucket["tokens"].shape[0])
        return None, attrs.evolve(plan.memory, arguments=0, temporaries=rows[-1] * 10, code=0, capacity=400)

    monkeypatch.setattr(module, "compile_function", compiled)
    tight = attrs.evolve(plan, memory=attrs.evolve(plan.memory, arguments=0, temporaries=10**6, code=0, capacity=400))
    messages = []
    resolved = resolve("quickstart", set=SMALL, target="cpu-8", with_=["gradient-accumulation:steps=2"])
    largest = add_largest_batch(attrs.evolve(tight, rows=1600, batch_unit=16), resolved, messages.append).largest_batch
    assert largest is not None
    assert (largest.rows, largest.too_large) == (32, 48)
    assert all(count % 16 == 0 for count in rows)
    assert len(messages) == len(rows) == largest.compiles
    assert "compiling 16 rows (1 of at most 6)" in messages[0]

    def refuse(*_):
        raise RequestError("the pipeline does not divide the batch\n    fix: another batch")

    monkeypatch.setattr(module, "compile_function", refuse)
    noted = add_largest_batch(attrs.evolve(tight, rows=1600, batch_unit=16), resolved, messages.append)
    assert noted.notes[-1] == "the largest batch is unknown: the pipeline does not divide the batch"
    unknown = attrs.evolve(plan, memory=attrs.evolve(plan.memory, capacity=None))
    assert add_largest_batch(unknown, resolved, messages.append) is unknown


def test_a_notebook_shows_sections_that_fold(plan):
    page = attrs.evolve(plan, title="<b>own</b>")._repr_html_()
    assert "&lt;b&gt;own&lt;/b&gt;" in page
    assert "<b>own" not in page
    assert page.count("<details") == page.count("</details>") == len(sections(plan))
    assert "<details open><summary>memory of one device</summary>" in page
    assert "<details><summary>mesh</summary>" in page
    assert "http" not in page
    assert repr(plan).startswith("<quickstart on cpu-8: 8 chips, 950,912 parameters; fits: ")
    assert len(repr(plan)) < 200


def test_a_narrow_base_is_suggested_for_adapters_that_compute_in_bfloat16(plan):
    tight = attrs.evolve(plan, memory=attrs.evolve(plan.memory, capacity=plan.memory.total - 1000))
    adapted = attrs.evolve(tight, features=frozenset({"lora"}), frozen_bytes=4000, compute_dtype="bfloat16")
    words = "--with lora:base_dtype=bfloat16"
    first = remedies(adapted, frozenset({"lora", "remat"}))[0]
    assert (first.words, first.total, first.seconds) == (words, plan.memory.total - 2000, 0.0)
    for other in (
        attrs.evolve(adapted, compute_dtype="float32"),  # rounding would change the results
        attrs.evolve(adapted, features=frozenset()),
        attrs.evolve(adapted, frozen_bytes=0),
    ):
        assert words not in [r.words for r in remedies(other, frozenset({"lora", "remat"}))]
    hopeless = attrs.evolve(adapted, memory=attrs.evolve(adapted.memory, capacity=1))
    actual = [r.words for r in remedies(hopeless, frozenset({"lora", "remat"}))]
    assert any(w.startswith(f"{words} --with remat") for w in actual)


def at_peak(plan, flops, dtype="bfloat16"):
    """Return the plan with FLOPs that run at the bfloat16 peak."""
    target = attrs.evolve(plan.machine.target, peak_flops={"bfloat16": 1e12})
    line = attrs.evolve(plan.roofline, compute=flops / plan.machine.devices / 1e12)
    return attrs.evolve(
        plan, machine=attrs.evolve(plan.machine, target=target), roofline=line, executed_flops={dtype: float(flops)}
    )


def test_causal_utilization_comes_first_and_explains_values_above_peak(plan):
    skips = at_peak(plan, 1.02 * plan.flops.causal)  # a kernel that skips masked pairs
    report, fields = text(skips), as_json(skips)
    assert fields["roofline_mfu_causal"] < 1 < fields["roofline_mfu"]
    first, second, third = report.split("\n  MFU ")[1].splitlines()[:3]
    assert first.split()[0] == "98.0%"
    assert "full attention" in second
    assert third.strip() == fields["roofline_mfu_note"]
    assert fields["roofline_mfu_note"].startswith("more than 100%: full attention counts masked pairs")
    narrow = at_peak(plan, plan.flops.causal / 2, dtype="int8")
    assert as_json(narrow)["roofline_mfu_note"].endswith("the peak is for bfloat16, but some products are in int8")
    plain = at_peak(plan, 1.02 * plan.flops.full)
    assert as_json(plain)["roofline_mfu_note"] is None
    assert "100%" not in text(plain)
    assert as_json(plan)["roofline_mfu_note"] is None, "the peak is unknown"


def test_what_does_not_fit_comes_with_remedies(plan):
    small = attrs.evolve(plan.memory, capacity=plan.memory.arguments + plan.memory.temporaries // 2)
    tight = attrs.evolve(plan, memory=small)
    actual = remedies(tight, frozenset({"remat", "gradient-accumulation"}))
    assert "--with gradient-accumulation:steps=2" in [
        r.words for r in actual
    ]  # two rows per device, so at most two microbatches
    assert any(r.words.startswith("--with remat:save=[") for r in actual)
    assert "does not fit" in text(tight, actual)
    assert text(tight, actual).count("not enough alone") == sum(r.total > small.capacity for r in actual)
    hopeless = attrs.evolve(plan, memory=attrs.evolve(small, capacity=1))
    assert "not enough alone" in text(hopeless, remedies(hopeless, frozenset({"remat"})))
    assert remedies(plan, frozenset({"remat"})) == []


@pytest.mark.slow
def test_the_command_fails_where_it_does_not_fit(monkeypatch):
    import axlearn_plugins_plan.memory as memory

    monkeypatch.setattr(memory, "capacity", lambda machine: 1000)
    words = [w for s in SMALL for w in ("--set", s)]
    command = ["plan", "quickstart", "--target", "cpu-8", "--no-largest-batch", *words]
    verbose = CliRunner().invoke(cli, [*command, "--verbose"])
    assert verbose.exit_code == 1
    assert "does not fit" in verbose.stdout
    assert "largest batch" not in verbose.stdout
    result = CliRunner().invoke(cli, [*command, "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["fits"] is False
    assert report["hbm_bytes"] == 1000
    assert {r["words"] for r in report["remedies"]} >= {"--with remat:policy=full"}


def test_wrong_requests():
    run = CliRunner().invoke
    for words, reason in (
        (["plan", "quickstart"], "add --target NAME"),
        (["plan", "quickstart", "--target", "cpu-x"], "not a size of the target"),
        (["plan", "quickstrt", "--target", "cpu-8"], "quickstart"),
        (["plan", "quickstart", "--target", "cpu-8", "--set", "input.batch_size=3"], "not divisible"),
        (["kernels", "explain", "quickstart"], "add --target NAME"),
        (["plan", "quickstart", "--target", "cpu-8", "--function", "decod"], "did you mean: decode?"),
    ):
        result = run(cli, words)
        assert result.exit_code == 2, result.output
        assert reason in result.stderr


def test_lists():
    listed = CliRunner().invoke(cli, ["targets", "list", "--json"])
    rows = {r["name"]: r for r in json.loads(listed.stdout)}
    assert rows["cpu"]["form"] == "cpu-DEVICES"
    assert "axlearn-core" in rows["cpu"]["distribution"]
    assert all(row["summary"] for row in rows.values())
    table = CliRunner().invoke(cli, ["targets", "list"]).stdout
    assert "  NVIDIA H100 SXM; figures: NVIDIA H100 Tensor Core GPU data sheet" in table
    assert "2 devices per chip" in table
    words = [w for s in SMALL for w in ("--set", s)]
    explained = CliRunner().invoke(cli, ["kernels", "explain", "quickstart", "--target", "cpu-8", "--json", *words])
    results = {r["name"]: r for r in json.loads(explained.stdout)}
    assert results["attention"]["kernel"] == "xla-blocked"
    assert results["attention"]["gradients"] is True


def test_the_kernels_of_another_function_are_explained():
    words = [
        "kernels",
        "explain",
        "quickstart",
        "--target",
        "cpu-8",
        "--json",
        *[w for s in SMALL for w in ("--set", s)],
    ]
    explained = CliRunner().invoke(cli, [*words, "--function", "decode"])
    rows = {r["name"]: r for r in json.loads(explained.stdout)}
    assert rows["attention"]["kernel"] == "xla"
    assert rows["attention"]["gradients"] is False
    unknown = CliRunner().invoke(cli, [*words, "--function", "decod"])
    assert unknown.exit_code == 2
    assert "did you mean: decode?" in unknown.stderr


def test_the_shapes_of_batches_are_those_of_real_ones():
    config = resolve("quickstart", set=SMALL).config
    batches = config.build_input(config.input, VOCAB).train()
    real = {k: (v.shape, v.dtype) for k, v in next(batches).items()}
    batches.close()
    assert {k: (v.shape, v.dtype) for k, v in abstract_batch(config).items()} == real


@pytest.mark.slow
def test_data_may_be_missing_and_nothing_else():
    words = ["kernels", "explain", "llama2-7b", "--target", "cpu-8", "--set", "model.decoder.num_layers=1"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "xla-blocked" in result.stdout
    result = CliRunner().invoke(cli, [*words, "--set", "model.decoder.layer.attention.num_kv_heads=5"])
    assert result.exit_code == 2
    assert "num_kv_heads" in result.stderr
    assert "tokenizer" not in result.stderr


def test_visible_pairs():
    ids = jax.ShapeDtypeStruct((2, 256), np.int32)
    assert visible_pairs(Causal(), 256, 256) == 0.5
    assert visible_pairs(Causal() & Segments(ids, ids), 256, 256) == 0.5
    assert visible_pairs(Causal() & SlidingWindow(64), 256, 256) == pytest.approx((64 * 256 - 64 * 64 / 2) / 256**2)
    assert visible_pairs(Segments(ids, ids), 256, 256) == 1.0


@pytest.mark.parametrize(
    ("message", "temporaries", "arguments"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (131.13G) "
            "exceeds available HBM (95.74G).",
            130.13,
            1.0,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 110.50G of "
            "95.74G hbm. Exceeded hbm capacity by 14.76G.\n\nTotal hbm usage >= 110.76G:\n    reserved        264.00M \n"
            "    program         109.00G \n    arguments         1.50G \n",
            109.0,
            1.5,
        ),
    ],
)
def test_what_compilers_say_when_memory_is_out(message, temporaries, arguments):
    target = Target(name="chip", hbm_bytes=95.74 * 2**30)
    machine = Machine(name="chip-1", target=target, chips=1, domains=1, chips_per_host=1)
    memory = parse_out_of_memory(message, 2**30, machine)
    assert memory is not None
    assert not memory.fits
    assert memory.temporaries == pytest.approx(temporaries * 2**30)
    assert memory.arguments == pytest.approx(arguments * 2**30)
    assert parse_out_of_memory("INTERNAL: a kernel does not compile", 0, machine) is None


def test_the_roofline_is_the_slowest_of_its_parts():
    target = Target(name="chip", peak_flops={"bfloat16": 100.0, "int8": 200.0}, hbm_bandwidth=10.0, link_bandwidth=5.0)
    line = roofline(target, 2, {"bfloat16": 400.0, "int8": 400.0}, 70.0, [])
    assert line.compute == 400 / 2 / 100 + 400 / 2 / 200
    assert (line.hbm, line.step, line.bound) == (7.0, 7.0, "hbm")
    assert peak(target, "float32") == 100.0


@pytest.mark.slow_cases("tpu-tpu-v5p-tokamax-mosaic-tpu")
@pytest.mark.parametrize(
    ("platform", "target", "kernel"),
    [
        ("gpu", "b200", "tokamax-triton"),
        ("gpu", "h100", "tokamax-mosaic"),
        ("tpu", "tpu-v5p", "megablox"),
        ("tpu", "tpu-v5p", "tokamax-mosaic-tpu"),
    ],
)
def test_grouped_kernels_count_each_row_once(platform, target, kernel):
    require("tokamax")
    from axlearn_plugins_moe.grouped_matmul import GroupedMatmulOp
    from axlearn_plugins_plan.flops import ScopedSelection, works

    rows, groups, inner, outer = 256, 4, 256, 384
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, inner), (groups, inner, outer))]
    sizes = jax.ShapeDtypeStruct((groups,), "int32")
    selection = ScopedSelection(platform=platform, target=target)

    def loss(lhs, rhs, sizes):
        return GroupedMatmulOp(lhs, rhs, sizes).run(kernel).astype("float32").sum()

    with use(selection):
        actual = list(
            works(
                jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))(*shapes, sizes).jaxpr, selection.scopes
            )
        )
    assert [c.name for c in selection.choices] == [kernel]
    products = [w for w in actual if w.flops == 2 * rows * inner * outer]
    assert len(products) in (3, 4)  # forward, perhaps recomputed, and the gradients of both operands
    assert sum(w.flops for w in actual) == pytest.approx(2 * rows * inner * outer * len(products), rel=0.02)
    assert {w.dtype for w in products} == {"bfloat16"}


def test_what_nothing_needs_is_not_counted():
    from axlearn_plugins_plan.flops import works

    def layer(x, w):
        return jax.checkpoint(lambda x, w: jax.numpy.tanh(x @ w))(x, w).sum()

    def call(x, w):
        # Dead code, which recomputation leaves from a call whose results were saved.
        jax.jit(lambda x, w: x @ w)(x, w)
        return layer(x, w)

    x, w = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 32), "float32")
    product = 2 * 8 * 16 * 32
    assert sum(work.flops for work in works(jax.make_jaxpr(call)(x, w).jaxpr)) == product
    # Forward, recomputation in the backward pass, and the gradients of both operands.
    step = jax.make_jaxpr(jax.value_and_grad(call, (0, 1)))(x, w).jaxpr
    assert sum(work.flops for work in works(step)) == 4 * product


@pytest.mark.parametrize("save", [("attention_residuals",), ()])
def test_a_kernel_whose_results_are_kept_does_not_run_again(save):
    require("axlearn_plugins_tpu")
    from axlearn_plugins_transformer.kernels.attention import AttentionOp
    from axlearn_plugins_transformer.kernels.masks import Causal

    policy = jax.checkpoint_policies.save_only_these_names(*save)

    def loss(query, key, value):
        attend = jax.checkpoint(lambda *x: AttentionOp(*x, mask=Causal(), scale=0.1).run("splash"), policy=policy)
        return attend(query, key, value).astype("float32").sum()

    shape = (1, 1024, 2, 128), "bfloat16"
    forward = counted("tpu", "tpu-v5p", loss, shape, shape, shape)
    gradients = counted("tpu", "tpu-v5p", loss, shape, shape, shape, gradients=(0, 1, 2))
    # The backward kernel has five products, the forward kernel two. A gradient alone does not need the loss value.
    assert gradients == 7 / 2 * forward
    step = counted("tpu", "tpu-v5p", jax.value_and_grad(loss, (0, 1, 2)), shape, shape, shape)
    assert step == (7 if save else 9) / 2 * forward


def counted(platform, target, function, *shapes, gradients=()):
    from axlearn_plugins_plan.flops import ScopedSelection, works

    with use(ScopedSelection(platform=platform, target=target)) as selection:
        run = jax.grad(function, gradients) if gradients else function
        actual = list(works(jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(*s) for s in shapes]).jaxpr, selection.scopes))
    return sum(w.flops for w in actual if w.kernel)


def test_a_fused_loss_counts_its_products_once():
    require("tokamax")
    from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options

    def loss(hidden, weight, targets):
        weights = jax.numpy.ones(targets.shape)
        return CrossEntropyOp(hidden, weight, targets, weights, Options(dtype="bfloat16")).run("tokamax-mosaic-tpu")[0]

    shapes = ((2, 1024, 256), "bfloat16"), ((256, 1024), "bfloat16"), ((2, 1024), "int32")
    product = 2 * 2048 * 256 * 1024
    assert counted("tpu", "tpu-v5e", loss, *shapes) == product
    assert counted("tpu", "tpu-v5e", loss, *shapes, gradients=(0, 1)) == 4 * product


@pytest.mark.fast_cases("b200-64")
@pytest.mark.parametrize(("target", "size"), [("h100", 128), ("b200", 64)])
def test_attention_in_mosaic_counts_by_its_formula(target, size, monkeypatch):
    require("tokamax")
    from axlearn_plugins_gpu.kernels import mosaic, tokamax
    from axlearn_plugins_transformer.kernels.attention import AttentionOp
    from axlearn_plugins_transformer.kernels.masks import Causal

    def loss(query, key, value):
        out = AttentionOp(query, key, value, mask=Causal(), scale=0.1, softcap=30.0).run("tokamax-mosaic")
        return out.astype("float32").sum()

    monkeypatch.setattr(mosaic, "_first", {})  # only traced, even if this process has compiled for another GPU
    shapes = [((2, 512, h, size), "bfloat16") for h in (8, 4, 4)]
    actual = counted("gpu", target, loss, *shapes, gradients=(0, 1, 2))
    # One kernel, or one for queries and one for keys and values.
    backward = 5 if target == "b200" and not tokamax.LATER else 3 + 4
    assert actual == (2 + backward) * 2 * 2 * 512 * 8 * 512 * size


def test_a_gated_unit_in_mosaic_counts_by_its_formula():
    require("tokamax")
    import attrs

    from axlearn_core.kernels.op import Op
    from axlearn_plugins_gpu.kernels.gated_linear_unit import _pipelined_unit
    from axlearn_plugins_transformer.kernels.gated_linear_unit import GatedLinearUnitOp

    @attrs.frozen(eq=False)
    class OfArrays(GatedLinearUnitOp):
        def reference(self):
            return _pipelined_unit(self.x, self.gate, self.up, "b200", "silu")

        abstract = Op.abstract

    def unit(x, gate, up):
        return OfArrays(x, gate, up, hidden_dim=512, activation="silu").run()

    shapes = [((1024, 256), "bfloat16"), *(((256, 512), "bfloat16"),) * 2]
    assert counted("gpu", "b200", unit, *shapes) == 2 * 2 * 1024 * 256 * 512
