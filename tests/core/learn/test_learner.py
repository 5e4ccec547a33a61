import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axlearn_core.config import Decoder, Node, QualifiedNames, check, configure, diff, encode, node
from axlearn_core.config import flatten as config_paths
from axlearn_core.contracts.capabilities import FreezesVariables
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.kernels.selection import Selection, use
from axlearn_core.learn import AdamW, Constant, Cosine, Learner, ParameterRule, flatten

AXES = {
    "embedding.weight": ("vocab", "embed"),
    "layer.attention.query.weight": ("layers", "embed", "heads", "head_dim"),
    "layer.attention.output.weight": ("layers", "heads", "head_dim", "embed"),
    "layer.norm.scale": ("layers", "norm"),
    "layer.up.weight": ("layers", "embed", "mlp"),
}
SHAPES = {
    "embedding.weight": (11, 8),
    "layer.attention.query.weight": (3, 8, 2, 4),
    "layer.attention.output.weight": (3, 2, 4, 8),
    "layer.norm.scale": (3, 8),
    "layer.up.weight": (3, 8, 12),
}
LOSS = jnp.float32(1.0)


def tree(seed: int, scale: float = 1.0) -> dict[str, jax.Array]:
    dice = np.random.default_rng(seed)
    return {p: jnp.asarray(scale * dice.standard_normal(s, np.float32)) for p, s in SHAPES.items()}


def learner(**fields):
    return check(Learner.Config(**fields)).build(max_steps=20, axes=AXES)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def run(instance, params, steps: int, grads=lambda i: tree(i + 1)):
    state, update, summaries = jax.jit(instance.init)(params), jax.jit(instance.update), {}
    for i in range(steps):
        params, state, summaries = update(grads(i), state, params, LOSS)
    assert update._cache_size() == 1  # shapes, dtypes and weak types come back as they went in
    return params, state, summaries


def by_hand(params, steps: int, optimizer):
    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(optimizer.init)(params)
        for i in range(steps):
            params, state = update(params, state, tree(i + 1))
    return params


def close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.fast_cases("1000000.0")
@pytest.mark.parametrize("norm", [1.0, 1e6])
def test_the_default_is_clipping_and_adamw_by_hand(norm):
    instance = learner(optimizer=AdamW(learning_rate=3e-4), max_grad_norm=norm)
    got, _, summaries = run(instance, tree(0), 4)
    reference = optax.chain(
        optax.clip_by_global_norm(norm), optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    )
    close(got, by_hand(tree(0), 4, reference))
    np.testing.assert_allclose(summaries["grad_norm"], optax.tree.norm(tree(4)), rtol=1e-6)
    np.testing.assert_allclose(summaries["learning_rate"], 3e-4, rtol=1e-6)


def test_any_optax_optimizer_fits_the_slot_and_reports_its_schedule():
    instance = learner(
        optimizer=configure(optax.lion, learning_rate=Cosine(peak=0.1, warmup_steps=2)), max_grad_norm=None
    )
    got, _, summaries = run(instance, tree(0), 3)
    schedule = Cosine(peak=0.1, warmup_steps=2).build(max_steps=20)
    close(got, by_hand(tree(0), 3, optax.lion(schedule)))
    np.testing.assert_allclose(summaries["learning_rate"], schedule(2), rtol=1e-6)


@pytest.mark.fast_cases("nested")
@pytest.mark.parametrize("kind", ["flat", "nested", "state"])
def test_any_pytree_of_parameters_gives_the_same_numbers(kind):
    flat = tree(0)

    def shaped(values):
        if kind == "flat":
            return dict(values)
        nested = nnx.traversals.unflatten_mapping({tuple(p.split(".")): v for p, v in values.items()})
        if kind == "nested":
            return nested
        return nnx.State(jax.tree.map(lambda x: nnx.Param(x), nested))

    instance = learner(rules=(ParameterRule(pattern="**.norm.*", weight_decay=False),))
    params, state = shaped(flat), instance.init(shaped(flat))
    new, _, _ = jax.jit(instance.update)(shaped(tree(1)), state, params, LOSS)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    expected, _, _ = run(instance, flat, 1)
    close(flatten(new), expected)


def test_rules_scale_exempt_and_freeze_by_path():
    rules = (
        ParameterRule(pattern="layer.attention.**", learning_rate_scale=0.5),
        ParameterRule(pattern="**.query.*", learning_rate_scale=0.5),
        ParameterRule(pattern="**.norm.*", weight_decay=False),
        ParameterRule(pattern="embedding.*", freeze=True),
    )
    optimizer = AdamW(learning_rate=1e-2, weight_decay=0.5)
    instance, plain = learner(optimizer=optimizer, rules=rules), learner(optimizer=optimizer)
    no_decay = learner(optimizer=AdamW(learning_rate=1e-2, weight_decay=0.0))
    frozen_grads = {**tree(1), "embedding.weight": jnp.zeros((11, 8))}  # those of frozen parameters do not count
    old = tree(0)
    new, state, summaries = run(instance, old, 1)
    base, _, _ = run(plain, old, 1, lambda i: frozen_grads)
    bare, _, _ = run(no_decay, old, 1, lambda i: frozen_grads)

    def moved(tree_, path):
        return tree_[path] - old[path]

    query, output = "layer.attention.query.weight", "layer.attention.output.weight"
    close(moved(new, query), 0.25 * moved(base, query))
    close(moved(new, output), 0.5 * moved(base, output))
    close(new["layer.norm.scale"], bare["layer.norm.scale"])
    close(new["layer.up.weight"], base["layer.up.weight"])
    assert not np.allclose(new["layer.norm.scale"], base["layer.norm.scale"])
    assert (new["embedding.weight"] == old["embedding.weight"]).all()
    assert not any("embedding" in jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state))
    np.testing.assert_allclose(summaries["grad_norm"], optax.tree.norm(frozen_grads), rtol=1e-6)


def test_a_rule_with_a_leading_mark_is_about_all_others():
    params = tree(0)
    new, state, _ = run(learner(rules=(ParameterRule(pattern="!**.attention.*.weight", freeze=True),)), params, 2)
    trained = {p for p in params if "attention" in p}
    assert {p for p in params if not np.array_equal(new[p], params[p])} == trained
    assert {p for p in flatten(state.optimizer) if p.endswith("scale") or "embedding" in p} == set()
    with pytest.raises(RequestError, match=r"the pattern '!\*\*' leaves no parameter"):
        learner(rules=(ParameterRule(pattern="!**", freeze=True),)).init(params)


def test_a_rule_that_fits_nothing_names_the_nearest():
    instance = learner(rules=(ParameterRule(pattern="layer.norms.scale"),))
    with pytest.raises(RequestError, match=r"learner\.rules\.0.*'layer\.norms\.scale'[^$]*nearest: layer\.norm\.scale"):
        instance.init(tree(0))


def test_exempting_from_a_decay_that_cannot_be_masked_is_an_error():
    instance = learner(
        optimizer=configure(optax.sgd, learning_rate=0.1), rules=(ParameterRule(pattern="**", weight_decay=False),)
    )
    with pytest.raises(ConfigError, match="no weight-decay mask"):
        instance.init(tree(0))


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match="there is nothing to train"):
        learner(rules=(ParameterRule(pattern="**", freeze=True),)).init(tree(0))


def test_the_moving_average_follows_and_is_what_is_evaluated():
    instance = learner(ema_decay=0.9)
    params, expected = tree(0), tree(0)
    state = instance.init(params)
    for i in range(3):
        params, state, _ = jax.jit(instance.update, donate_argnums=(1, 2))(tree(i + 1), state, params, LOSS)
        expected = {p: 0.9 * e + 0.1 * params[p] for p, e in expected.items()}
    close(instance.evaluation_params(state, params), expected)
    assert learner().evaluation_params(learner().init(params), params) is params


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    with use(Selection(platform=request.param)):
        yield request.param


@pytest.mark.fast_cases("gpu-loss")
@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad, platform):
    instance = learner(ema_decay=0.5)
    params, state, _ = run(instance, tree(0), 2)
    grads = tree(9)
    if bad == "gradient":
        grads["layer.norm.scale"] = grads["layer.norm.scale"].at[0, 0].set(jnp.nan)
    new, after, summaries = jax.jit(instance.update)(
        grads, state, params, LOSS if bad == "gradient" else jnp.inf * LOSS
    )
    jax.tree.map(np.testing.assert_array_equal, new, params)
    jax.tree.map(np.testing.assert_array_equal, (after.optimizer, after.ema), (state.optimizer, state.ema))
    assert (after.updates, after.skipped, after.skipped_in_a_row, summaries["skipped_steps"]) == (2, 1, 1, 1)
    _, later, _ = jax.jit(instance.update)(tree(3), after, new, LOSS)
    assert (later.updates, later.skipped, later.skipped_in_a_row) == (3, 1, 0)


@pytest.mark.fast_cases("gpu-optimizer1")
@pytest.mark.parametrize(
    "optimizer",
    [
        configure(optax.noisy_sgd, learning_rate=0.1, key=0),
        configure(optax.adam, learning_rate=0.1, mu_dtype="bfloat16"),
        configure(optax.adafactor, learning_rate=0.1),
    ],
)
def test_what_an_optimizer_keeps_stays_as_it_is_too(optimizer, platform):
    instance = learner(optimizer=optimizer)
    params, state, _ = run(instance, tree(0), 2)
    new, after, _ = jax.jit(instance.update)(tree(9), state, params, jnp.inf * LOSS)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), after.optimizer, state.optimizer)))
    jax.tree.map(np.testing.assert_array_equal, new, params)
    changed, _, _ = jax.jit(instance.update)(tree(9), state, params, LOSS)
    assert not np.array_equal(jax.tree.leaves(changed)[0], jax.tree.leaves(params)[0])


def test_low_precision_parameters_keep_their_dtype():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(0))
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(1))
    instance = learner(ema_decay=0.9, optimizer=AdamW(learning_rate=Constant(peak=0.01, warmup_steps=0)))
    new, state, summaries = run(instance, params, 2, lambda i: grads)
    assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
    assert summaries["grad_norm"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(instance.evaluation_params(state, new))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"accumulate_steps": 0}, "accumulate_steps"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"optimizer": 3}, "optimizer"),
    ],
)
def test_values_out_of_range_are_refused(fields, path):
    with pytest.raises(ConfigError, match=path):
        Learner.Config(**fields)


def test_the_update_costs_what_the_hand_written_one_costs():
    size = 1 << 20
    params = {"w": jnp.ones((size // 1024, 1024)), "b": jnp.ones((1024,))}
    instance = Learner.Config(optimizer=AdamW(learning_rate=3e-4)).build(max_steps=10)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))

    def hand(grads, state, params, loss):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    costs = []
    for init, update in ((instance.init, instance.update), (chain.init, hand)):
        compiled = jax.jit(update, donate_argnums=(1, 2)).lower(params, init(params), params, LOSS).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        costs.append((cost["bytes accessed"], memory.temp_size_in_bytes + memory.output_size_in_bytes, cost["flops"]))
    (our_bytes, our_memory, our_flops), (bytes_, memory, flops) = costs
    assert our_bytes <= 1.02 * bytes_
    assert our_memory <= 1.02 * memory
    assert our_flops <= flops


def test_a_rule_in_a_file_needs_no_type():
    read = Decoder(QualifiedNames()).decode([{"pattern": "a.*", "freeze": True}], tuple[ParameterRule, ...])
    assert read == (ParameterRule(pattern="a.*", freeze=True),)


def test_a_rule_optimizer_updates_only_its_parameters_without_clipping():
    params = {"decoder.w": jnp.ones((4, 4)), "router.bias": jnp.zeros((3,))}
    grads = {"decoder.w": jnp.full((4, 4), 2.0), "router.bias": jnp.asarray([300.0, -5.0, 0.0])}
    rule = ParameterRule(pattern="**.bias", optimizer=configure(optax.sgd, learning_rate=0.5))
    instance = Learner.Config(optimizer=AdamW(learning_rate=0.1), rules=(rule,)).build(max_steps=9)
    state = instance.init(params)
    new, _, summaries = jax.jit(instance.update)(grads, state, params, jnp.float32(0))
    alone = Learner.Config(optimizer=AdamW(learning_rate=0.1)).build(max_steps=9)
    rest = {"decoder.w": params["decoder.w"]}
    expected, _, _ = jax.jit(alone.update)({"decoder.w": grads["decoder.w"]}, alone.init(rest), rest, jnp.float32(0))
    np.testing.assert_allclose(new["decoder.w"], expected["decoder.w"], rtol=1e-6)
    assert float(summaries["grad_norm"]) == pytest.approx(8.0)
    np.testing.assert_allclose(new["router.bias"], -0.5 * grads["router.bias"], rtol=1e-6)


def test_a_rule_s_optimizer_clips_its_own_group():
    params = {"w": jnp.ones((4, 4)), "a.bias": jnp.zeros((2,)), "b.bias": jnp.zeros((2,))}
    grads = {"w": jnp.full((4, 4), 2.0), "a.bias": jnp.asarray([3.0, 0.0]), "b.bias": jnp.asarray([0.0, 4.0])}
    rule = ParameterRule(pattern="*.bias", optimizer=configure(optax.sgd, learning_rate=1.0), max_grad_norm=2.0)
    instance = check(
        Learner.Config(optimizer=configure(optax.sgd, learning_rate=1.0), max_grad_norm=4.0, rules=(rule,))
    ).build(max_steps=9)
    new, _, summaries = jax.jit(instance.update)(grads, instance.init(params), params, LOSS)
    np.testing.assert_allclose(new["w"], 1 - grads["w"] * 4 / 8, rtol=1e-6)
    np.testing.assert_allclose(new["a.bias"], -grads["a.bias"] * 2 / 5, rtol=1e-6)
    np.testing.assert_allclose(new["b.bias"], -grads["b.bias"] * 2 / 5, rtol=1e-6)
    assert float(summaries["grad_norm"]) == pytest.approx(8.0)


def test_a_norm_for_a_rule_without_an_optimizer_is_refused():
    with pytest.raises(ConfigError, match="the rule has no optimizer"):
        learner(rules=(ParameterRule(pattern="**.norm.*", max_grad_norm=1.0),))


def test_a_default_that_is_hidden_is_in_no_file():
    rule = ParameterRule(pattern="a.*")
    assert "max_grad_norm" not in encode(rule, QualifiedNames())
    assert "max_grad_norm" not in config_paths(rule)
    limited = ParameterRule(pattern="a.*", optimizer=configure(optax.sgd, learning_rate=0.1), max_grad_norm=1.0)
    assert config_paths(limited)["max_grad_norm"] == 1.0
    assert "max_grad_norm" in [c.path for c in diff(rule, limited)]


@node
class HalfWay(Node[optax.GradientTransformation]):
    """Descends, and evaluates half-way back to the start, which it keeps."""

    def build(self, **_):
        return optax.GradientTransformation(
            lambda params: {"start": jax.tree.map(jnp.copy, params)},
            lambda grads, state, params=None: (jax.tree.map(lambda g: -g, grads), state),
        )

    def evaluation_params(self, state, params):
        return jax.tree.map(lambda a, b: (a + b) / 2, state["start"], params)


def test_an_optimizer_says_what_to_evaluate_with():
    instance = learner(optimizer=HalfWay(), max_grad_norm=None)
    params, state, _ = run(instance, tree(0), 2)
    close(instance.evaluation_params(state, params), jax.tree.map(lambda a, b: (a + b) / 2, tree(0), params))


def test_a_rule_s_optimizer_says_so_for_its_parameters_alone():
    rules = (
        ParameterRule(pattern="layer.norm.*", optimizer=HalfWay()),
        ParameterRule(pattern="embedding.*", freeze=True),
    )
    instance = learner(rules=rules)
    params, state, _ = run(instance, tree(0), 2)
    averages = instance.evaluation_params(state, params)
    for path, value in params.items():
        expected = (value + tree(0)[path]) / 2 if "norm" in path else value
        np.testing.assert_allclose(averages[path], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema_decay": 0.9}, r"learner\.ema_decay: learner\.optimizer \(HalfWay\) already keeps an average"),
        (
            {"rules": (ParameterRule(pattern="**.norm.*", learning_rate_scale=0.5),)},
            "does not account for scaled updates",
        ),
    ],
)
def test_an_average_of_the_optimizer_s_own_excludes_others(fields, message):
    with pytest.raises(ConfigError, match=message):
        learner(optimizer=HalfWay(), **fields).init(tree(0))


def test_a_non_finite_gradient_of_a_rule_optimizer_skips_the_step():
    params = {"w": jnp.ones((2,)), "bias": jnp.zeros((2,))}
    rule = ParameterRule(pattern="bias", optimizer=configure(optax.sgd, learning_rate=0.5))
    instance = Learner.Config(rules=(rule,)).build(max_steps=9)
    grads = {"w": jnp.ones((2,)), "bias": jnp.asarray([jnp.nan, 0.0])}
    new, state, _ = jax.jit(instance.update)(grads, instance.init(params), params, jnp.float32(0))
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(new["w"], params["w"])


@pytest.mark.parametrize(
    ("pattern", "frozen"), [("a.*|b", {"a.x", "b"}), ("!a.*|b", {"a", "c.x"}), ("!a.*|**.x", {"a", "b"})]
)
def test_a_pattern_may_have_alternatives(pattern, frozen):
    learner = Learner.Config(rules=(ParameterRule(pattern=pattern, freeze=True),)).build(max_steps=1)
    assert set(learner.frozen_params(["a", "a.x", "b", "c.x"])) == frozen


def test_a_freezing_rule_keeps_variables_that_train_by_rules_of_their_own():
    rules = (
        ParameterRule(pattern="!**.lora_*|objective.**", freeze=True),
        ParameterRule(pattern="**.weight", learning_rate_scale=2.0),
    )
    learner = Learner.Config(rules=rules).build(max_steps=1)
    assert learner.frozen_variables(["decoder.layer.router.bias"]) == ["decoder.layer.router.bias"]
    some = Learner.Config(rules=(ParameterRule(pattern="decoder.0.**", freeze=True),)).build(max_steps=1)
    assert some.frozen_variables(["decoder.0.router.bias", "decoder.1.router.bias"]) == ["decoder.0.router.bias"]
    assert isinstance(learner, FreezesVariables)
