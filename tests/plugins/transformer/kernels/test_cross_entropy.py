import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axlearn_core.contracts.mesh import DEFAULT_RULES, MESH_AXES
from axlearn_core.nn.sharding import constrain, logical_rules
from axlearn_plugins_plan.collectives import collectives
from axlearn_plugins_plan.groups import Places
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_transformer.kernels import cross_entropy
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp, Options, chunk_positions

B, S, D, V = 3, 20, 16, 37
WIDE = 4 * B * S
"""A width at which the gradients of all logits take less memory than the gradient of the output layer."""


def plain(hidden, weight, targets, weights, softcap, z_loss):
    logits = jnp.einsum("bsd,dv->bsv", hidden, weight)
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    log_z = jax.nn.logsumexp(logits, axis=-1)
    entropy = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (entropy + z_loss * log_z**2)), jnp.sum(weights * entropy)


def operands_of(width):
    rng = np.random.default_rng(0)
    return tuple(
        jax.device_put(x.astype(np.int32 if x.dtype == np.int64 else np.float32))
        for x in (
            rng.standard_normal((B, S, width)),
            rng.standard_normal((width, V)) * (D / width) ** 0.5,
            rng.integers(0, V, (B, S)),
            rng.uniform(size=(B, S)) / (B * S),
        )
    )


@pytest.fixture
def operands():
    return operands_of(D)


@pytest.mark.fast_cases(
    "20-0.1-3.0-240", "64-0.0-None-16", "64-0.0-None-240", "7-0.1-None-240", "None-0.1-3.0-16", "None-0.1-3.0-240"
)
@pytest.mark.parametrize("width", [D, WIDE])
@pytest.mark.parametrize(
    ("chunk", "z_loss", "softcap"),
    [(1, 0.0, None), (4, 0.1, 3.0), (7, 0.0, 3.0), (7, 0.1, None), (20, 0.1, 3.0), (64, 0.0, None), (None, 0.1, 3.0)],
)
def test_equals_the_plain_formulation(width, chunk, z_loss, softcap):
    operands = operands_of(width)
    options = Options(chunk=chunk, z_loss=z_loss, softcap=softcap)

    @jax.jit
    def ours(h, w, *others):
        return CrossEntropyOp(h, w, *others, options).run()

    @jax.jit
    def theirs(h, w, *others):
        return plain(h, w, *others, softcap, z_loss)

    def slopes(function):
        """Differentiate with a cotangent other than 1, to see that it is used."""
        scaled = lambda *args: (lambda r: (3 * r[0], r[1]))(function(*args))  # noqa: E731
        return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True))(*operands)

    (actual, found_aux), found_grads = slopes(ours)
    (expected, expected_aux), grads = slopes(theirs)
    np.testing.assert_allclose([actual, found_aux], [expected, expected_aux], rtol=1e-5)
    np.testing.assert_allclose(ours(*operands), theirs(*operands), rtol=1e-5)
    for a, b in zip(found_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


def test_never_holds_all_logits_and_computes_no_product_twice():
    b, s, d, v = 2, 256, 8, 512
    shapes = [jax.ShapeDtypeStruct(x, t) for x, t in (
        ((b, s, d), jnp.float32), ((d, v), jnp.float32), ((b, s), jnp.int32), ((b, s), jnp.float32))]  # fmt: skip

    def step(hidden, weight, targets, weights):
        return jax.grad(
            lambda h, w: CrossEntropyOp(h, w, targets, weights, Options(chunk=16)).run()[0], argnums=(0, 1)
        )(hidden, weight)  # fmt: skip

    jaxpr = jax.make_jaxpr(step)(*shapes)
    sizes, products = [], 0

    def visit(part):
        nonlocal products
        for eqn in part.eqns:
            sizes.extend(v.aval.size for v in eqn.outvars)
            products += eqn.primitive.name == "dot_general"
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr.jaxpr)
    assert max(sizes) == b * 16 * v  # the logits of one chunk are the largest array there is
    assert products == 3


def test_what_waits_for_the_product_behind_the_chunks_is_the_smaller(monkeypatch):
    calls = []
    for name in ("_scan_logit_grads", "_scan_weight_grads"):
        scan = getattr(cross_entropy, name)
        monkeypatch.setattr(cross_entropy, name, lambda *a, name=name, scan=scan: (calls.append(name), scan(*a))[1])
    for width in (D, WIDE):
        hidden, weight, targets, weights = operands_of(width)
        options = Options(chunk=4)
        jax.eval_shape(
            jax.grad(lambda w, h=hidden, t=targets, s=weights, o=options: CrossEntropyOp(h, w, t, s, o).run()[0]),
            weight,
        )
    assert calls == ["_scan_weight_grads", "_scan_logit_grads"]


def test_chunks_are_as_long_as_a_device_has_memory_for():
    assert chunk_positions(8, 32768) == 256  # 256 MiB of float32
    assert chunk_positions(8, 262144) == 64, "no fewer than 512 positions of a device"
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1, 4, 1, 1, 2), MESH_AXES)
    with logical_rules(mesh, DEFAULT_RULES):
        assert chunk_positions(8, 32768) == 256 * 4 * 2


@pytest.mark.parametrize("width", [D, WIDE])
def test_gradients_of_the_head_add_up_in_float32(width):
    hidden, weight, targets, weights = operands_of(width)
    options = Options(dtype="bfloat16", chunk=4)
    actual = jax.jit(jax.grad(lambda w: CrossEntropyOp(hidden, w, targets, weights, options).run()[0]))(weight)
    expected = jax.jit(jax.grad(lambda w: plain(hidden, w, targets, weights, None, 0.0)[0]))(weight)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=2e-2 * float(np.abs(expected).max()))


def test_positions_without_weight_do_not_count(operands):
    hidden, weight, targets, weights = map(np.array, operands)
    weights[:, 5:] = 0
    other = np.where(np.arange(S)[None, :, None] < 5, hidden, np.float32(100))
    loss = jax.jit(lambda hidden: CrossEntropyOp(hidden, weight, targets, weights, Options(chunk=3)).run())
    np.testing.assert_array_equal(loss(hidden), loss(other))


@pytest.mark.fast_cases("shape1-32")
@pytest.mark.parametrize("width", [32, 512])
@pytest.mark.parametrize("shape", [(1, 1, 8, 1, 1, 1), (1, 2, 2, 1, 1, 2)])
def test_chunks_send_nothing_of_the_weight(shape, width):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), MESH_AXES)
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(s, np.float32) for s in ((16, 64, width), (width, 128)))
    targets, weights = rng.integers(0, 128, (16, 64)).astype(np.int32), np.full((16, 64), 1 / 1024, np.float32)
    options = Options(chunk=8, constrain=lambda x: constrain(x, "batch", "sequence", "activation_vocab"))
    loss = jax.value_and_grad(lambda h, w: CrossEntropyOp(h, w, targets, weights, options).run()[0], (0, 1))

    def sharded(h, w):
        with logical_rules(mesh, DEFAULT_RULES):
            return loss(h, w)

    rows, matrix = (jax.sharding.NamedSharding(mesh, P(*s)) for s in ((("data", "fsdp"),), ("fsdp", "tensor")))
    compiled = jax.jit(sharded, in_shardings=(rows, matrix), out_shardings=(None, (rows, matrix))).lower(hidden, weight)
    compiled = compiled.compile()
    got = compiled(jax.device_put(hidden, rows), jax.device_put(weight, matrix))
    for ours, alone in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(loss)(hidden, weight)), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-7)
    places = Places(dict(zip(MESH_AXES, shape, strict=True)), np.zeros(8, int))
    over_rows = [c for c in collectives(parse(compiled.as_text()), places) if "tensor" not in c.axes]
    whole = width * 128 * 4 // mesh.shape["tensor"]
    assert any(c.operand_bytes >= whole for c in over_rows)  # the gradient, once
    assert all(c.times == 1 or c.operand_bytes < 100 for c in over_rows)


def test_a_tied_output_layer_in_bfloat16():
    """XLA on CPUs cannot run the transposed form of this product."""
    table, hidden = jnp.ones((24, 8)), jnp.ones((2, 5, 8), jnp.bfloat16)
    targets, weights, options = jnp.zeros((2, 5), jnp.int32), jnp.full((2, 5), 0.1), Options(dtype="bfloat16")
    slope = jax.jit(jax.grad(lambda t: CrossEntropyOp(hidden, t.T, targets, weights, options).run()[0]))(table)
    expected = np.where(np.arange(24) == 0, 1 / 24 - 1, 1 / 24)[:, None] * np.ones((24, 8))
    np.testing.assert_allclose(slope, expected, rtol=2e-2)
