import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.config import Node, find, interface, node, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.learn import Learner, flatten
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear
from axlearn_core.plugins.registry import registry
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_finetune.lora.adapters import is_adapter, merge, scales_of, split, unmerge
from axlearn_plugins_finetune.lora.feature import FROZEN, FROZEN_WITH_OBJECTIVE, Lora, without_adapters
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear, is_adapted
from axlearn_plugins_moe.feature import MoE
from axlearn_plugins_rope.feature import Rope

ATTENTION = "model.decoder.layer.attention"
QUICK = {"xla_backend_optimization_level": 0}  # compilation would dominate the time of these tests
ALL = Lora(rank=4, alpha=8.0, target="model.**")


def one(base=None, **settings):
    cfg = LoraLinear.Config(base=base or Linear.Config(), **settings)
    axes, dims = ("embed", "heads", "head_dim"), {"input_dims": (6,), "output_dims": (2, 3)}
    return cfg.build(**dims, axes=axes, rngs=nnx.Rngs(0), precision=Precision())


def test_the_map_is_its_base_plus_the_scaled_product():
    layer = one(rank=2, alpha=3.0, base=Linear.Config(bias=True))
    assert isinstance(layer, Linear)
    x = np.random.default_rng(1).standard_normal((4, 5, 6), np.float32)
    plain = np.einsum("bsd,dnh->bsnh", x, layer.weight.get_value())
    run = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_allclose(run(layer, x), plain, atol=1e-6)
    layer.lora_b.set_value(jax.device_put(np.random.default_rng(2).standard_normal((2, 2, 3), np.float32)))
    expected = plain + 3.0 / 2 * np.einsum("bsd,dr,rnh->bsnh", x, layer.lora_a.get_value(), layer.lora_b.get_value())
    np.testing.assert_allclose(run(layer, x), expected, rtol=1e-5, atol=1e-5)
    assert layer.lora_a.get_metadata()["out_sharding"] == ("embed", "rank")
    assert layer.lora_b.get_metadata()["out_sharding"] == ("rank", "heads", "head_dim")


class Doubled(nnx.Module):
    """A third-party projection without a config."""

    def __init__(self, input_dims: tuple, output_dims: tuple, *, rngs: nnx.Rngs, factor: float = 2.0):
        self.weight = nnx.Param(jnp.ones((*input_dims, *output_dims)), out_sharding=("embed", "heads", "head_dim"))
        self.factor = factor

    def __call__(self, x):
        return self.factor * jnp.einsum("...d,dnh->...nh", x, self.weight[...])


def double(input_dims: tuple, output_dims: tuple, *, rngs: nnx.Rngs):
    return Doubled(input_dims, output_dims, rngs=rngs)


@node
class Own(Node):
    """A config with a custom `build`."""

    input_dims: tuple[int, ...] = interface()
    output_dims: tuple[int, ...] = interface()

    def build(self, *, input_dims, output_dims, rngs, **_):
        return Doubled(input_dims, output_dims, rngs=rngs)


def test_lora_keeps_the_class_of_its_base_even_without_a_config():
    with nnx.use_eager_sharding(False):
        layer = one(rank=2, base=ax.configure(Doubled, factor=3.0))
    assert isinstance(layer, Doubled)
    assert is_adapted(layer)
    assert set(nnx.to_flat_state(nnx.state(layer)).paths) == {("weight",), ("lora_a",), ("lora_b",)}
    np.testing.assert_allclose(layer(jnp.ones((4, 6))), 18.0)
    layer.lora_b.set_value(jnp.ones((2, 2, 3)))
    x = jnp.ones((1, 6))
    update = jnp.einsum("bd,dr,rnh->bnh", x, layer.lora_a[...], layer.lora_b[...])
    np.testing.assert_allclose(layer(x), 18.0 + 16.0 / 2 * update, rtol=1e-5)
    with nnx.use_eager_sharding(False):
        plain = ax.configure(Doubled).build(input_dims=(6,), output_dims=(2, 3), rngs=nnx.Rngs(0))
    assert type(plain) is Doubled
    assert type(one(rank=2)) is type(one(rank=4))  # equal modules compare equal


@pytest.mark.parametrize(("base", "got"), [(ax.configure(double), "double"), (Own(), "Own")])
def test_a_map_whose_class_is_not_known_before_it_is_built_is_refused(base, got):
    with pytest.raises(ConfigError, match="its class is unknown until it is built") as error:
        one(base=base)
    (problem,) = error.value.problems
    assert (problem.path, got in problem.got) == ("base", True)


def test_adapters_have_dtypes_of_their_own():
    layer = one(rank=2, param_dtype="float32", base=Linear.Config(param_dtype="bfloat16", dtype="bfloat16"))
    assert (layer.weight[...].dtype, layer.lora_a[...].dtype) == (jnp.bfloat16, jnp.float32)
    assert layer(jnp.ones((2, 6))).dtype == jnp.bfloat16


@pytest.mark.slow
def test_at_first_it_is_the_base_exactly(toy, batch):
    """A map with adapters has the same parameters, the same paths and a bitwise equal loss for the same seed."""
    dense, adapted = (Functional.from_config(c.model) for c in (toy(), ALL.apply(toy())))
    a, b = (jax.jit(f.init, compiler_options=QUICK)(jax.random.key(3)) for f in (dense, adapted))
    assert a.keys() == split(b)[0].keys()
    assert all(np.array_equal(a[p], b[p]) for p in a)
    losses = [
        jax.jit(lambda p, f=f: f.bind(p).loss(batch)[0], compiler_options=QUICK)(p)
        for f, p in ((dense, a), (adapted, b))
    ]
    assert losses[0] == losses[1]
    instance = adapted.bind(adapted.abstract)
    firsts = [b[f"{p}.lora_a"] for p in scales_of(instance)]
    assert len({float(x[0].ravel()[0]) for x in firsts} | {float(x[1].ravel()[0]) for x in firsts}) == 2 * len(firsts)


@pytest.mark.slow
def test_only_adapters_change_and_only_they_have_optimizer_state(toy, trained):
    config = ALL.apply(toy())
    before, state, losses = trained(config)
    after = state.params
    assert {p for p in before if not np.array_equal(before[p], after[p])} == {p for p in before if is_adapter(p)}
    moments = {p for p in flatten(state.learner.optimizer) if "weight" in p or "lora" in p or "scale" in p}
    assert moments
    assert all(is_adapter(p) for p in moments)
    assert losses[2] < losses[0]


def test_merged_weights_compute_the_same_and_come_apart_again(toy, batch, program, trained):
    config = ALL.apply(toy())
    instance = program(config).functional
    params, scales = trained(config)[1].params, scales_of(program(config).functional.bind(instance.abstract))
    dense = Functional.from_config(without_adapters(config).model)
    merged = merge(params, scales)
    assert merged.keys() == dense.abstract.keys()

    adapted_logits, dense_logits = (
        jax.jit(lambda p, f=f: f.bind(p)(batch["tokens"]), compiler_options=QUICK) for f in (instance, dense)
    )
    two = [adapted_logits(params), dense_logits(merged)]
    assert float(jnp.abs(two[0] - two[1]).max()) < 1e-5 * float(jnp.abs(two[0]).max())
    base = dense_logits(split(params)[0])
    assert float(jnp.abs(two[0] - base).max()) > 1e-2 * float(jnp.abs(two[0]).max())  # the adapters were trained

    again = unmerge(merged, split(params)[1], scales)
    assert again.keys() == params.keys()
    for path in params:
        np.testing.assert_allclose(again[path], params[path], rtol=0, atol=2e-7, err_msg=path)


@pytest.mark.slow
def test_the_experts_of_a_mixture_have_adapters_of_their_own(toy, tmp_path):
    """An adapted map starts equal to its base, and its trained adapters merge and save separately."""
    dense = MoE(num_experts=3, shared_experts=1).apply(toy())
    config = Lora(rank=3, target="model.**.feed_forward.**").apply(dense)
    whole = Functional.from_config(config.model)
    assert whole.abstract["decoder.layer.feed_forward.down.lora_a"].shape == (2, 3, 48, 3)
    assert whole.axes["decoder.layer.feed_forward.down.lora_a"] == ("layers", "experts", "mlp", "rank")

    plain, adapted = (
        Functional.from_config(c.model.decoder.layer.feed_forward, input_dim=32, precision=Precision())
        for c in (dense, config)
    )
    scales = scales_of(adapted.bind(adapted.abstract))
    assert set(scales) == {f"{part}{name}" for part in ("", "shared.") for name in ("gate", "up", "down")}
    params = jax.jit(adapted.init, compiler_options=QUICK)(jax.random.key(3))
    assert not np.array_equal(params["up.lora_a"][0], params["up.lora_a"][1])
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    without, with_ = (jax.jit(lambda p, f=f: f.bind(p)(x), compiler_options=QUICK) for f in (plain, adapted))
    base, first = split(params)
    before = without(base)
    assert np.array_equal(with_(params), before)
    dice = np.random.default_rng(0)
    params |= {p: jnp.asarray(0.3 * dice.normal(size=x.shape), x.dtype) for p, x in first.items() if "lora_b" in p}
    after = with_(params)
    assert float(jnp.abs(after - before).max()) > 1e-2
    np.testing.assert_allclose(without(merge(params, scales)), after, rtol=0, atol=1e-6 * float(jnp.abs(after).max()))
    adapters.save(tmp_path, params, scales)
    exported = adapters.load(tmp_path)
    exported.check(base)
    assert np.array_equal(with_({**base, **exported.params}), after)


def test_merging_takes_adapters_of_the_right_shape_only():
    weight, a, b = jnp.ones((3, 6, 2, 4)), jnp.ones((3, 6, 2)), jnp.ones((3, 2, 2, 4))
    params = {"x.weight": weight, "x.lora_a": a, "x.lora_b": b, "norm.scale": jnp.ones(3)}
    result = merge(params, {"x": 0.5})
    np.testing.assert_array_equal(result["x.weight"], 2 * weight)
    assert merge({**params, "x.weight": weight.astype(jnp.bfloat16)}, {"x": 0.5})["x.weight"].dtype == jnp.bfloat16
    for path, value in (("x.lora_b", b[..., :3]), ("x.lora_a", a[:2]), ("x.lora_a", a[..., :1])):
        with pytest.raises(RequestError, match="on a different base"):
            merge({**params, path: value}, {"x": 0.5})
    with pytest.raises(RequestError, match="merge before the weights are quantized"):
        merge({**params, "x.weight": weight.astype(jnp.int8)}, {"x": 0.5})
    with pytest.raises(RequestError, match="different maps"):
        merge(params, {})


@pytest.mark.slow
def test_eight_devices_train_as_one(toy, trained):
    config = ALL.apply(toy())
    sharded = patch(config, {"mesh.shape": {"data": 2, "fsdp": 2, "tensor": 2}})
    (_, one, losses), (_, eight, sharded_losses) = trained(config), trained(sharded, 8)
    np.testing.assert_allclose(losses, sharded_losses, rtol=2e-6)
    spread = eight.params["decoder.layer.attention.query.lora_a"].sharding.spec
    assert "fsdp" in spread
    for path, value in one.params.items():
        np.testing.assert_allclose(value, eight.params[path], atol=5e-5, err_msg=path)


@pytest.mark.slow_cases("llama2-70b")
@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "llama3-8b"])
def test_published_models_take_adapters(name):
    dense, adapted = (ax.resolve(name, with_=w).config for w in ([], ["lora:rank=8"]))
    before, after = (Functional.from_config(c.model) for c in (dense, adapted))
    added = after.abstract.keys() - before.abstract.keys()
    assert {p.rpartition(".")[0].rpartition(".")[2] for p in added} == {"query", "key", "value", "output"}
    assert all(None not in after.axes[p] for p in added)
    state = jax.eval_shape(Learner.Config(rules=(FROZEN,)).build(max_steps=10, axes=after.axes).init, after.abstract)
    size = sum(x.size for x in jax.tree.leaves(state))
    assert size == pytest.approx(2 * sum(after.abstract[p].size for p in added), abs=10)


def test_the_target_says_which(toy):
    def adapted(target):
        return set(find(Lora(target=target).apply(toy()), LoraLinear))

    assert adapted(f"{ATTENTION}.query") == {f"{ATTENTION}.query"}
    assert adapted(("model.**.query", "model.**.up")) == {f"{ATTENTION}.query", "model.decoder.layer.feed_forward.up"}
    assert adapted("model.**.attention.*") == {f"{ATTENTION}.{n}" for n in ("query", "key", "value", "output")}
    assert len(adapted("model.**")) == 7


@pytest.mark.parametrize(
    ("target", "nearest"),
    [
        ("model.**.atention.*", "attention"),
        ("model.**.qury", "query"),
        (("model.**", "model.**.feed_foward.*"), "feed_forward"),
    ],
)
def test_a_target_that_fits_nothing_names_the_nearest(toy, target, nearest):
    with pytest.raises(ConfigError) as error:
        Lora(target=target).apply(toy())
    (problem,) = error.value.problems
    assert "does not match any linear map" in problem.message
    assert any(nearest in path for path in problem.nearest)


def test_applied_again_it_sets_options_and_adapts_nothing_twice(toy):
    result = Lora(rank=4).apply(toy())
    assert find(result, f"{ATTENTION}.query")[f"{ATTENTION}.query"] == LoraLinear.Config(rank=4, alpha=16.0)
    assert Lora().apply(result) == result
    assert Lora(rank=4).in_effect(result)
    assert Lora().in_effect(result)
    assert not Lora(rank=8).in_effect(result)
    wider = Lora(alpha=2.0, target="model.**").apply(result)
    nodes = find(wider, LoraLinear)
    assert len(nodes) == 7
    assert all(type(n.base) is Linear.Config and n.alpha == 2.0 for n in nodes.values())
    assert {n.rank for p, n in nodes.items() if "attention" in p} == {4}
    assert wider.learner.rules == (FROZEN,)
    assert without_adapters(wider) == toy()


def test_the_rule_of_an_earlier_version_is_replaced_and_removed(toy):
    earlier = patch(Lora().apply(toy()), {"learner.rules": (FROZEN_WITH_OBJECTIVE,)})
    assert Lora().apply(earlier).learner.rules == (FROZEN,)
    assert without_adapters(earlier) == toy()


def test_rope_and_lora_give_one_tree_in_any_order():
    first, second = "rope:theta=7.0", "lora:rank=4"
    one, other = (ax.resolve("quickstart", with_=w).config for w in ([first, second], [second, first]))
    assert one == other
    assert find(one, f"{ATTENTION}.position.theta") == {f"{ATTENTION}.position.theta": 7.0}
    assert Rope(theta=7.0).apply(one) == one


def test_on_the_command_line_a_wrong_target_ends_with_exit_code_2():
    result = CliRunner().invoke(cli, ["config", "check", "quickstart", "--with", "lora:target=model.**.atention.*"])
    assert result.exit_code == 2
    assert "does not match any linear map" in result.stderr
    assert "did you mean" in result.stderr


def test_a_learner_without_rules_cannot_freeze(toy):
    with pytest.raises(ConfigError, match="cannot freeze the base"):
        Lora().apply(toy({"learner": Linear.Config()}))


@pytest.mark.parametrize("option", ["base", "adapters"])
def test_a_directory_that_holds_nothing_is_named(option, tmp_path):
    with pytest.raises(ConfigError, match=f"lora.{option}: no .* in that directory"):
        ax.resolve("quickstart", with_={"lora": {option: str(tmp_path)}})


def test_adapters_alone(toy, trained, tmp_path):
    config = ALL.apply(toy())
    params = trained(config)[1].params
    scales = scales_of(Functional.from_config(config.model).bind(Functional.from_config(config.model).abstract))
    adapters.save(tmp_path, params, scales)
    actual = adapters.load(tmp_path)
    assert actual.scales == scales
    assert actual.params.keys() == split(params)[1].keys()
    assert all(np.array_equal(x, params[p]) for p, x in actual.params.items())
    actual.check(params)
    other = {**params, "decoder.layer.attention.key.weight": params["decoder.layer.attention.key.weight"] + 1e-6}
    with pytest.raises(RequestError, match="different values"):
        actual.check(other)
    with pytest.raises(RequestError, match=r"no decoder.layer.attention.key.weight"):
        actual.check({p: x for p, x in params.items() if ".key." not in p})
    with pytest.raises(RequestError, match="no adapters to write"):
        adapters.save(tmp_path, split(params)[0], {})
    (tmp_path / adapters.WEIGHTS).write_bytes(b"torn")
    with pytest.raises(RequestError, match="are damaged"):
        adapters.load(tmp_path)
    with pytest.raises(RequestError, match="has no exported adapters"):
        adapters.load(tmp_path / "nowhere")


def test_bfloat16_adapters_come_back_as_they_were(tmp_path):
    key = jax.random.key(0)
    shapes = {"x.weight": (4, 6), "x.lora_a": (4, 2), "x.lora_b": (2, 6)}
    params = {p: jax.random.normal(key, s, jnp.bfloat16) for p, s in shapes.items()}
    adapters.save(tmp_path, params, {"x": 1.0})
    actual = adapters.load(tmp_path)
    assert actual.params["x.lora_a"].dtype == jnp.bfloat16
    actual.check(params)


def test_what_is_adapted_is_told_from_what_is_not(toy):
    model = Functional.from_config(Lora().apply(toy()).model)
    names = {".".join(map(str, p)) for p, m in nnx.iter_modules(model.bind(model.abstract)) if is_adapted(m)}
    assert names == {f"decoder.layer.attention.{n}" for n in ("query", "key", "value", "output")}


def test_all_names_are_registered():
    names = registry()
    assert names.component("lora-linear") is LoraLinear.Config
    assert names.feature("lora") is Lora
    assert "lora" in names.claims["commands"]
