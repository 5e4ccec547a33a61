"""Serving layouts of linear maps: which maps change, and that all compute what `Linear` does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import map as map_nodes
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.sharding import logical_rules
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.runner_program import RunnerProgram
from axlearn_plugins_serving.serving_linear import (
    LAYOUTS,
    WEIGHT_FIRST_ROWS,
    ColumnParallelLinear,
    ServingLinear,
    TransposedLinear,
    describe_kept_layouts,
    lay_out_maps,
)
from axlearn_plugins_transformer.generate import Generator
from support import serving_models

FEW, MANY = 16, WEIGHT_FIRST_ROWS + 16
DIMS = [((24,), (4, 10)), ((4, 6), (40,)), ((4, 6), (5, 8))]
SIZES = {
    "runner.block_size": 4, "runner.max_context": 48, "runner.max_rows": 4, "runner.max_step_tokens": 24,
    "runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip


def linear(inputs=(24,), outputs=(4, 10), kind=Linear, axes=None, **options):
    axes = axes or (*[None] * len(inputs), *[None] * len(outputs))
    one = kind.Config(**{"bias": True, **options}).build(
        input_dims=inputs, output_dims=outputs, axes=axes, rngs=nnx.Rngs(0), precision=Precision()
    )
    if one.cfg.bias:
        one.bias[...] = jnp.arange(np.prod(outputs), dtype=jnp.float32).reshape(outputs)
    return one


class Scaled(Linear):
    """A subclass that computes something else."""

    def __call__(self, x):
        return 3 * super().__call__(x)


class Holder(nnx.Module):
    """A module with maps in all kinds of attributes."""

    def __init__(self):
        self.alone = linear()
        self.again = self.alone
        self.listed = nnx.List([linear(outputs=(8,)), linear(outputs=(8,), kind=Scaled)])
        self.named = nnx.Dict(a=linear(outputs=(3,)))
        self.stack = linear(outputs=(4, 10))
        self.stack.weight.set_value(jnp.ones((2, 24, 4, 10)))  # like two experts


@pytest.mark.slow_cases(
    "transposed-inputs0-outputs0-1",
    "transposed-inputs0-outputs0-16",
    "transposed-inputs0-outputs0-240",
    "transposed-inputs1-outputs1-1",
    "transposed-inputs1-outputs1-240",
    "transposed-inputs2-outputs2-1",
)
@pytest.mark.parametrize("rows", [1, FEW, MANY])
@pytest.mark.parametrize(("inputs", "outputs"), DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_the_same(layout, inputs, outputs, rows):
    plain = linear(inputs, outputs)
    served = LAYOUTS[layout](plain)
    if layout == "transposed":
        assert served.matrix.shape == (np.prod(outputs), np.prod(inputs))
    np.testing.assert_array_equal(served.weight[...], plain.weight[...])
    assert len(served.weight.get_metadata("out_sharding")) == plain.weight.ndim
    x = jax.random.normal(jax.random.key(0), (rows, 1, *inputs))
    np.testing.assert_allclose(served(x), plain(x), atol=1e-5)


@pytest.mark.parametrize(("rows", "first"), [(FEW, True), (MANY, False)])
def test_a_transposed_weight_is_the_first_factor_for_few_rows(rows, first):
    """XLA for CPU copies the second factor of a product in each call, and would swap the factors of the transposed product."""
    graph, state = nnx.split(TransposedLinear(linear(bias=False)))
    run = jax.jit(lambda state, x: jnp.tanh(nnx.merge(graph, state)(x)))
    program = run.lower(state, jnp.zeros((rows, 24))).compile().as_text()
    products = re.findall(r"= f32\[(\d+),(\d+)\]\S* (?:dot|custom-call|fusion)\([^\n]*dot_general", program)
    assert (("40", str(rows)) if first else (str(rows), "40")) in products


@pytest.mark.parametrize(("axes", "gathers"), [(("embed", "heads", "kv"), False), (("heads", "embed", None), True)])
def test_devices_share_columns_and_never_a_sum(axes, gathers):
    plain = linear(axes=axes)
    served = ColumnParallelLinear(plain)
    assert served.weight.get_metadata("out_sharding") == (None, "mlp", None)
    assert plain.weight.get_metadata("out_sharding") == axes, "the weight of training keeps its axes"
    graph, state = nnx.split(served)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    with logical_rules(mesh, {"mlp": ("tensor",)}):
        text = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, jnp.zeros((3, 24))).as_text()
    assert len(re.findall("sharding_constraint", text)) == (3 if gathers else 1)


@pytest.mark.fast_cases("column_parallel")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_maps_are_replaced_wherever_they_stand(layout):
    model = Holder()
    paths = sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model)))
    lay_out_maps(model, layout)
    assert [type(x) for x in (model.alone, model.listed[0], model.named["a"])] == [LAYOUTS[layout]] * 3
    assert model.again is model.alone
    assert [type(x) for x in (model.listed[1], model.stack)] == [Scaled, Linear]
    laid_out = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert sorted(path.replace(".matrix", ".weight") for path in laid_out) == paths


def test_each_class_with_a_product_of_its_own_is_named_once():
    model = Holder()
    model.more = nnx.List([linear(kind=Scaled)])
    (note,) = describe_kept_layouts(model)
    assert note.startswith("listed.1 and 1 more: a Scaled has its own product")
    assert describe_kept_layouts(linear()) == ()


def scaled(part):
    if type(part) is not Linear.Config:
        return part
    return Scaled.Config(bias=part.bias, init=part.init)


@pytest.mark.slow  # other tests compare each layout with its map, and serve plain maps
@pytest.mark.parametrize("kind", ["plain", "a subclass", "lora"])
def test_maps_of_every_kind_are_served_as_they_generate(kind, capsys):
    cfg = serving_models.config(*(["lora:rank=2"] if kind == "lora" else []))
    if kind == "a subclass":
        cfg = map_nodes(cfg, scaled)
    model = cfg.build(rngs=nnx.Rngs(0))
    if kind == "lora":  # adapters start at zero
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(lambda x: x + 0.05, state))
    prompts = [np.random.default_rng(i).integers(0, 64, 2 + 3 * i).tolist() for i in range(3)]
    with serve(model, set=SIZES) as engine:
        results = engine.generate(prompts, max_tokens=6, temperature=0)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == tuple(Generator(model)(prompt, max_tokens=6))
    notes = [line for line in capsys.readouterr().err.splitlines() if "has its own product" in line]
    names = {"plain": [], "a subclass": ["Scaled"], "lora": ["LinearWithLora"]}[kind]
    assert [name in note for name, note in zip(names, notes, strict=True)] == [True] * len(names)


class ReadsWeight(nnx.Module):
    """A layer that uses its map's square weight directly, so no shape reveals a transposed weight."""

    def __init__(self):
        self.up = linear(outputs=(24,))

    def __call__(self, x):
        return x @ self.up.weight[...].reshape(24, 24)


@pytest.mark.fast_cases("column_parallel")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_that_reads_the_weight_of_its_map_computes_the_same(layout):
    module, x = ReadsWeight(), jax.random.normal(jax.random.key(0), (3, 24))
    expected = module(x)
    lay_out_maps(module, layout)
    assert isinstance(module.up, ServingLinear)
    np.testing.assert_allclose(module(x), expected, atol=1e-5)


def test_a_served_map_is_a_projection_without_the_interface_of_training():
    assert not issubclass(ServingLinear, Layer), "it is not a component, and configs do not name it"
    served = TransposedLinear(linear())
    assert sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(served))) == ["bias", "matrix"]


@pytest.mark.slow
def test_weights_that_a_server_takes_keep_the_shapes_of_training():
    functional = Functional.from_config(serving_models.config())
    with serve(serving_models.model(), set=SIZES) as engine:
        runner = engine.engine.runner
        assert {p: s.shape for p, s in runner.program.functional.abstract.items()} == {
            p: s.shape for p, s in functional.abstract.items()
        }
        engine.update_weights(functional.extract_weights(serving_models.model()))
        assert runner.weights.arrays["decoder.layer.0.attention.query.matrix"].ndim == 2


@pytest.mark.parametrize(
    ("features", "changes", "devices", "layout"),
    [
        ([], {}, 1, "transposed"),
        ([], {}, 2, "transposed"),
        (["mla"], {}, 1, None),
        ([], {"mode": "parity"}, 1, None),
        ([], {"mode": "parity"}, 2, "column_parallel"),
    ],
)
def test_the_mode_the_devices_and_the_model_choose_the_layout(features, changes, devices, layout):
    cfg = ModelRunner.Config(**{**serving_models.SIZES, **changes})
    mesh = Mesh(shape={"tensor": devices} if devices > 1 else {})
    program = RunnerProgram(cfg, serving_models.config(*features), jax.devices()[:devices], mesh)
    shapes = {path: spec.shape for path, spec in program._serving.specs.items()}
    maps = ("decoder.layer.0.feed_forward.up", "decoder.layer.1.attention.output")
    assert program._serving.sizes.layout == layout
    name, ndims = ("matrix", [2, 2]) if layout == "transposed" else ("weight", [2, 3])
    assert [len(shapes[f"{path}.{name}"]) for path in maps] == ndims


@pytest.mark.parametrize(("changes", "count"), [({}, 1), ({"mode": "parity"}, 0)])
def test_maps_are_named_if_others_are_laid_out(changes, count):
    cfg = ModelRunner.Config(**{**serving_models.SIZES, **changes})
    program = RunnerProgram(cfg, serving_models.config("lora:rank=2"), jax.devices()[:1])
    notes = program.notes()
    assert [note.partition(" has its own")[0].rpartition(" ")[2] for note in notes] == ["LinearWithLora"] * count
