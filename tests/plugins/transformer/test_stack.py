"""Stacks with several kinds of layers, tested on a layer that is easy to compute by hand."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import REQUIRED, find, interface, node, patch, replace_config
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn import summaries
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.nn.remat import Remat, tag
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rope.feature import Rope
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_transformer.alternate import (
    Alternate,
    LayerPattern,
    find_pattern,
    layer_configs,
    with_shortest_cycles,
)
from axlearn_plugins_transformer.stack import MixedLayers, Stack, each_layer, unstack

LAYER = "model.decoder.layer"


class Wide(Layer):
    """x + sum over `width` copies."""

    @node
    class Config(Layer.Config["Wide"]):
        dim: int = interface(default=REQUIRED)
        width: int = 2

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.up = self.child(
            Linear.Config(), rngs=rngs, input_dims=(cfg.dim,), output_dims=(cfg.width,), axes=("embed", "mlp")
        )

    def __call__(self, x):
        y = tag(self.up(x), f"wide{self.cfg.width}")
        summaries.add_loss("size", jnp.float32(self.cfg.width))
        summaries.add_summary(f"width{self.cfg.width}", jnp.sum(y) * 0 + self.cfg.width)
        return x + jnp.mean(jnp.tanh(y), axis=-1, keepdims=True)


class Block(Layer):
    @node
    class Config(Layer.Config["Block"]):
        input_dim: int = interface(default=REQUIRED)
        inner: object = Wide.Config()

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.inner = self.child(cfg.inner, rngs=rngs, dim=cfg.input_dim)

    def __call__(self, x, context, cache=None):
        return self.inner(x), None if cache is None else cache + 1

    def init_cache(self):
        return jnp.full((), self.inner.cfg.width, jnp.int32)


def block(children, first=()):
    wide = lambda widths: tuple(Wide.Config(width=w) for w in widths)  # noqa: E731
    return Block.Config(inner=Alternate(children=wide(children), first=wide(first)))


def make(stack, cfg, num_layers):
    build = lambda c, rngs: c.build(rngs=rngs, precision=Precision(), input_dim=4)  # noqa: E731
    return stack.init(build, cfg, num_layers, nnx.Rngs(0))


def run(stack, layers, x):
    with summaries.collect() as collector:
        y, _ = stack(layers, x, Context())
    return y, collector.losses, collector.summaries


CASES = {
    "every other": ((2, 3), (), 6, [2, 3] * 3),
    "dense first": ((3,), (2,), 5, [2, 3, 3, 3, 3]),
    "five to one, and a remainder": ((2, 2, 3), (), 8, [2, 2, 3, 2, 2, 3, 2, 2]),
    "three kinds": ((2, 3, 5), (3, 3), 9, [3, 3, 2, 3, 5, 2, 3, 5, 2]),
    "one layer": ((2, 3), (), 1, [2]),
    "nothing repeats": ((2, 3, 5), (), 3, [2, 3, 5]),
}


def close(got, expected):
    """Compare relative to the largest element: elements near zero are differences and have their rounding errors."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.fast_cases("one layer-plain")
@pytest.mark.parametrize(
    "remat",
    [pytest.param(None, id="plain"), pytest.param(Remat.Config(save=("wide2",)), id="remat", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("case", CASES)
def test_scan_unrolled_and_one_by_one_are_the_same(case, remat):
    children, first, count, widths = CASES[case]
    cfg = block(children, first)
    scan, unrolled = (Stack(Stack.Config(mode=m, remat=remat)) for m in ("scan", "unrolled"))
    layers = make(scan, cfg, count)
    assert [x.inner.cfg.width for x in each_layer(layers, count)] == widths
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))

    def loss(stack, layers, x):
        y, losses, reported = run(stack, layers, x)
        return jnp.sum(y**2), (y, losses, reported)

    results = [
        nnx.jit(nnx.value_and_grad(lambda m, s=s: loss(s, m, x), has_aux=True))(layers) for s in (scan, unrolled)
    ]
    by_hand = x
    for layer in unstack(layers, count):
        by_hand, _ = layer(by_hand, Context())
    for (_, (y, losses, reported)), grads in results:
        close(y, by_hand)
        assert float(losses["size"]) == sum(widths)
        assert {k: float(v) for k, v in reported.items()} == {f"width{w}": w for w in widths}
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(results[0][1]), strict=True):
            close(a, b)


def test_each_kind_has_its_own_parameters_with_an_axis_of_layers():
    layers = make(Stack(Stack.Config()), block((2, 3)), 5)
    assert isinstance(layers, MixedLayers)
    flat = {".".join(map(str, k)): v for k, v in nnx.to_flat_state(nnx.state(layers))}
    assert {k: v.get_value().shape for k, v in flat.items()} == {
        "0.inner.up.weight": (3, 4, 2),
        "1.inner.up.weight": (2, 4, 3),
    }
    meta = flat["0.inner.up.weight"].get_metadata()
    assert tuple(meta.get("out_sharding") or meta.get("sharding_names")) == ("layers", "embed", "mlp")


def test_equal_layers_stay_one_stack():
    layers = make(Stack(Stack.Config()), block((2, 2)), 4)
    assert not isinstance(layers, MixedLayers)


def test_with_a_cache_each_layer_gets_its_own():
    stack = Stack(Stack.Config())
    layers = make(stack, block((2, 3)), 4)
    cache = tuple(layer.init_cache() for layer in each_layer(layers, 4))
    x = jnp.ones((1, 1, 4))
    for module in (layers, unstack(layers, 4)):
        _, new = stack(module, x, Context(), cache)
        assert [int(c) for c in new] == [3, 4, 3, 4]


@pytest.mark.parametrize(("children", "traced"), [((2, 2), [2]), ((2, 3), [2, 3])])
def test_with_a_cache_the_code_of_a_kind_is_traced_once(children, traced, monkeypatch):
    stack, x, widths = Stack(Stack.Config()), jnp.ones((1, 1, 4)), []
    layers = make(stack, block(children), 4)
    cache = tuple(layer.init_cache() for layer in each_layer(layers, 4))
    expected, _ = stack(layers, x, Context(), cache)
    call = Wide.__call__
    monkeypatch.setattr(Wide, "__call__", lambda self, x: (widths.append(self.cfg.width), call(self, x))[1])
    for module in (layers, unstack(layers, 4)):
        graph, state = nnx.split(module)
        y, new = jax.jit(lambda state, x, g=graph: stack(nnx.merge(g, state), x, Context(), cache))(state, x)
        assert widths == traced
        close(y, expected)
        assert [int(c) for c in new] == [3, *[c + 1 for c in children[1:]], 3, *[c + 1 for c in children[1:]]]
        widths.clear()


def test_a_scan_has_the_code_of_one_period():
    stack = Stack(Stack.Config())
    text = {}
    for count in (4, 40):
        layers = make(stack, block((2, 3)), count)
        text[count] = str(jax.make_jaxpr(lambda x, m=layers: run(stack, m, x)[0])(jnp.ones((1, 2, 4)))).count("tanh")
    assert text == {4: 2, 40: 2}


def test_a_tag_must_exist_in_some_kind_of_layer():
    stack = Stack(Stack.Config(remat=Remat.Config(save=("wide4",))))
    layers = make(stack, block((2, 3)), 4)
    with pytest.raises(RequestError, match="wide4"):
        stack(layers, jnp.ones((1, 2, 4)), Context())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([0, 0, 0], (0, 1, 3)),
        ([0, 1, 0, 1], (0, 2, 2)),
        ([0, 1, 1, 1], (1, 1, 3)),
        ([0, 0, 1, 0, 0, 1, 0, 0], (0, 3, 2)),
    ],
)
def test_the_plan_has_the_least_code(kinds, expected):
    assert find_pattern(kinds) == LayerPattern(*expected)


def test_features_reach_the_children_and_each_layer_has_its_own():
    cfg = replace_config(block((2, 3)), Wide, Wide.Config(dtype="bfloat16"))
    cfg = patch(cfg, {"inner.children.1.width": 7})
    assert [(c.inner.width, c.inner.dtype) for c in layer_configs(cfg, 3)] == [
        (2, "bfloat16"),
        (7, "bfloat16"),
        (2, "bfloat16"),
    ]


def test_layers_may_have_nothing_in_an_optional_slot():
    """Every fourth layer has no position encoding, as in SmolLM3 and Llama 4."""
    position = f"{LAYER}.attention.position"
    children = [{"type": "rope"}, {"type": "rope", "fraction": 0.5}, {"type": "rope"}, None]
    settings = {position: {"type": "alternate", "children": children}, "model.decoder.num_layers": 8}
    resolved = Rope(theta=7.0).apply(
        resolve("quickstart", set=settings).config
    )  # changes only the layers that have one
    rope, part = RotaryEmbedding.Config(theta=7.0), RotaryEmbedding.Config(theta=7.0, fraction=0.5)
    assert find(resolved, position)[position] == Alternate(children=(rope, part, rope, None))
    layers = layer_configs(resolved.model.decoder.layer, 8)
    assert [layer.attention.position for layer in layers] == [rope, part, rope, None] * 2


def test_a_slot_that_must_not_be_empty_is_named():
    slot = f"{LAYER}.attention.output"
    resolved = resolve("quickstart", set={slot: {"type": "alternate", "children": [{"type": "linear"}, None]}})
    with pytest.raises(ConfigError) as error:
        layer_configs(resolved.config.model.decoder.layer, 2)
    assert "output: layer 1 of the stack has no valid component in this slot" in str(error.value)
    assert "only an optional slot may be null" in str(error.value)


def test_where_no_stack_chooses_it_says_so():
    with pytest.raises(ConfigError, match="must be below a stack of layers"):
        Alternate(children=(Wide.Config(),)).build()


class Sharing(Layer):
    """Add a value that it shares, or that an earlier layer shared, and its input."""

    @node
    class Config(Layer.Config["Sharing"]):
        input_dim: int = interface(default=REQUIRED)
        shares: bool = True

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        self.up = self.child(
            Linear.Config(),
            rngs=rngs,
            input_dims=(cfg.input_dim,),
            output_dims=(cfg.input_dim,),
            axes=("embed", "mlp"),
        )

    def __call__(self, x, context, cache=None):
        if self.cfg.shares:
            context.share("value", {"x": jnp.tanh(self.up(x))})
        return x + context.read_shared("value")["x"] + context.layer_inputs["bias"][:, None], None


SHARED = {
    "the first layer shares": ((False,), (True,), 5),
    "a layer in each repeat": ((True, False, False), (), 7),
    "layers before the repeats and in them": ((False, True), (True,), 6),
}


@pytest.mark.fast_cases("a layer in each repeat")
@pytest.mark.parametrize("case", SHARED)
def test_shared_values_and_inputs_reach_layers_in_a_scan_as_unrolled(case):
    children, first, count = SHARED[case]
    sharing = lambda flags: tuple(Sharing.Config(shares=s) for s in flags)  # noqa: E731
    cfg = Alternate(children=sharing(children), first=sharing(first))
    scan, unrolled, remat = (
        Stack(Stack.Config(mode=mode, remat=remat))
        for mode, remat in (("scan", None), ("unrolled", None), ("scan", Remat.Config(save=())))
    )
    layers = make(scan, cfg, count)
    x, bias = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 4), (2, count, 4)]))

    def loss(stack, layers, bias):
        y, _ = stack(layers, x, Context(layer_inputs={"bias": bias}))
        return jnp.sum(y**2)

    expected, shared = x, {}
    for number, layer in enumerate(unstack(layers, count)):
        expected, _ = layer(expected, Context(layer_inputs={"bias": bias[:, number]}, shared=shared))
    results = [
        jax.jit(jax.value_and_grad(lambda state, bias, g=graph, s=stack: loss(s, nnx.merge(g, state), bias), (0, 1)))(
            state, bias
        )
        for stack in (scan, unrolled, remat)
        for graph, state in [nnx.split(layers)]
    ]
    for value, gradients in results:
        close(value, jnp.sum(expected**2))
        jax.tree.map(close, gradients, results[0][1])
    assert all(max(np.abs(g).max() for g in jax.tree.leaves(tree)) > 1e-3 for tree in results[0][1])


def test_a_value_that_no_earlier_layer_shares_is_refused():
    cfg = Alternate(children=(Sharing.Config(shares=False), Sharing.Config()))
    context = Context(layer_inputs={"bias": jnp.zeros((1, 4, 4))})
    for mode in ("scan", "unrolled"):
        stack = Stack(Stack.Config(mode=mode))
        with pytest.raises(RequestError, match=r"no earlier layer shares 'value'\n *expected: one of \[\]\n *fix"):
            stack(make(stack, cfg, 4), jnp.ones((1, 2, 4)), context)


def test_an_array_without_an_input_for_each_layer_is_refused():
    stack = Stack(Stack.Config())
    layers = make(stack, Sharing.Config(), 4)
    with pytest.raises(
        RequestError, match=r"layer_inputs\['bias'\].*\n *got: \[1, 3, 4\]\n *expected: \[rows, 4, \.\.\.\]"
    ):
        stack(layers, jnp.ones((1, 2, 4)), Context(layer_inputs={"bias": jnp.zeros((1, 3, 4))}))


def test_the_shortest_form_of_cycles_gives_the_same_layers():
    layer = resolve("gemma2-2b").config.model.decoder.layer
    attention, windows = layer.attention, layer.attention.window.children
    longer = attrs.evolve(attention, window=Alternate(first=windows, children=windows * 2))
    one, other = (attrs.evolve(layer, attention=slot) for slot in (attention, longer))
    assert with_shortest_cycles(other, 8) == with_shortest_cycles(one, 8) == one
    assert layer_configs(other, 8) == layer_configs(one, 8)
    nested = attrs.evolve(layer, attention=Alternate(children=(Alternate(children=(attention, attention)), longer)))
    assert layer_configs(with_shortest_cycles(nested, 8), 8) == layer_configs(nested, 8)
