"""Attention in C++ matches the reference for all shapes, dtypes, instruction sets and contents of unwritten slots."""

import functools
import itertools

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.contracts.kernels import KernelContext
from axlearn_core.kernels import selection
from axlearn_plugins_cpu.kernels import library
from axlearn_plugins_cpu.kernels.paged_attention import NATIVE, attend
from axlearn_plugins_transformer.kernels.bias import LinearBias
from axlearn_plugins_transformer.kernels.paged_attention import Split
from support.paged_calls import INSTRUCTIONS, REQUESTS, call

CPU = KernelContext(platform="cpu", gradients=False)
ATTRIBUTES = {name: np.int64(1) for name in ("singles", "chunk", "devices")}
ATTRIBUTES |= {name: np.int64(0) for name in ("window", "instructions")}
ATTRIBUTES |= {"scale": np.float32(1), "softcap": np.float32(0), "invariant": False}


SINKS = jnp.asarray([3.0, -1.0, 0.5, 2.0, 0.0, 8.0])


def operands(op):
    return op.query, op.pages, jnp.zeros((0,), jnp.float32), op.table, op.lengths, library.sinks(op)


def error(op, instructions=0):
    """Return the largest difference from the reference, relative to the largest element."""
    got, expected = (np.asarray(jax.jit(f)(), np.float32) for f in (lambda: attend(op, instructions), op.reference))
    assert got.shape == expected.shape
    return np.max(np.abs(got - expected)) / np.max(np.abs(expected))


@pytest.mark.fast_cases("three tokens-0", "three tokens-1", "three tokens-2", "three tokens-3")
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_requests(requests, instructions):
    if instructions > library.instructions:
        pytest.skip(f"needs a processor with instruction set {instructions}")
    assert error(call(requests), instructions) < 1e-5


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"window": 45}, {"heads": 2}, {"sinks": SINKS}], ids=lambda x: " ".join(x) or "plain"
)
def test_consecutive_chunks_of_a_request_give_the_bits_of_one_chunk(options, instructions):
    """The kernel computes such chunks together, but not chunks of another request whose positions happen to fit."""
    if instructions > library.instructions:
        pytest.skip(f"needs a processor with instruction set {instructions}")
    whole = call((0, 2, 120, [333, 453]), **options)  # the second request continues where the first ends
    starts = jnp.arange(7, dtype=jnp.int32) * 40
    lengths = jnp.asarray([253, 293, 333, 373, 413, 453], jnp.int32)
    split = {"table": jnp.repeat(whole.table, 3, axis=0), "lengths": lengths, "starts": starts, "split": Split(0, 40)}
    parts = attrs.evolve(whole, **split, count=jnp.asarray([6], jnp.int32))
    got, expected = (jax.jit(functools.partial(attend, op, instructions))() for op in (parts, whole))
    np.testing.assert_array_equal(got, expected)
    alone = [jax.jit(functools.partial(attend, _chunk(parts, i), instructions))() for i in range(6)]
    np.testing.assert_array_equal(got, jnp.concatenate(alone))


def _chunk(op, index):
    """Return the call for one chunk of a call without single tokens."""
    chunk, one = op.split.chunk, slice(index, index + 1)
    alone = {"query": op.query[index * chunk : (index + 1) * chunk], "table": op.table[one], "lengths": op.lengths[one]}
    return attrs.evolve(op, **alone, starts=jnp.asarray([0, chunk], jnp.int32), count=jnp.asarray([1], jnp.int32))


@pytest.mark.fast_cases("2-heads8-groups1-", "3-sinks-")
@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [
        ({"heads": 4, "groups": 4}, 1e-5),
        ({"heads": 8, "groups": 1}, 1e-5),
        ({"heads": 14, "size": 80}, 1e-5),
        ({"size": 16}, 1e-5),
        ({"size": 48, "slots": 8}, 1e-5),
        ({"size": 128, "slots": 5}, 1e-5),
        ({"window": 7}, 1e-5),
        ({"window": 600}, 1e-5),
        ({"softcap": 3.0}, 1e-5),
        ({"softcap": 3.0, "window": 33, "slots": 32}, 1e-5),
        ({"store": "int8"}, 1e-5),
        ({"dtype": "bfloat16", "store": "int8", "heads": 2}, 2e-2),
        ({"sinks": SINKS}, 1e-5),
        ({"sinks": SINKS, "softcap": 3.0, "window": 33}, 1e-5),
    ],
    ids=lambda x: "-".join(f"{k}{'' if k == 'sinks' else v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_shapes(shape, tolerance, instructions):
    if instructions > library.instructions:
        pytest.skip(f"needs a processor with instruction set {instructions}")
    for requests in ("tokens and chunks", "more than one block"):
        assert error(call(requests, **shape), instructions) < tolerance


@pytest.mark.parametrize(
    "options", [{}, {"sinks": SINKS}, {"window": 33, "softcap": 3.0}], ids=["plain", "sinks", "window"]
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_log_sum_exp(options, instructions):
    if instructions > library.instructions:
        pytest.skip(f"needs a processor with instruction set {instructions}")
    for requests in ("tokens and chunks", "more than one block"):
        op = call(requests, log_sum_exp=True, **options)
        got = jax.jit(functools.partial(attend, op, instructions))()
        result, log_sums = jax.jit(op.reference)()
        np.testing.assert_allclose(got[..., -1], log_sums, rtol=1e-5, atol=1e-5)
        plain = jax.jit(functools.partial(attend, attrs.evolve(op, log_sum_exp=False), instructions))()
        np.testing.assert_array_equal(got[..., :-1], plain)
        np.testing.assert_allclose(plain, result, rtol=1e-4, atol=1e-5)


def test_the_log_sum_exp_of_a_token_that_sees_no_key_is_the_lowest():
    op = call((2, 1, 4, [9, 0, 0]), log_sum_exp=True)
    assert np.all(np.asarray(jax.jit(lambda: attend(op))())[1:, :, -1] == np.float32(-1e30))


def test_the_log_sum_exp_is_chosen_and_keeps_the_dtype():
    op = call("three tokens", dtype="bfloat16", log_sum_exp=True)
    chosen = selection.Selection(platform="cpu", gradients=False)
    with selection.use(chosen):
        result, log_sums = jax.eval_shape(lambda: op.run(None))
    assert chosen.choices[0].name == "native"
    assert (str(result.dtype), str(log_sums.dtype), log_sums.shape) == ("bfloat16", "float32", op.query.shape[:2])


@pytest.mark.slow_cases("chunks", "more than one block")
@pytest.mark.parametrize("requests", REQUESTS)
def test_bfloat16_is_read_and_rounded_exactly(requests):
    op = call(requests, dtype="bfloat16")
    in_float32 = attrs.evolve(op, query=op.query.astype(jnp.float32), pages=op.pages.astype(jnp.float32))
    got, expected = (jax.jit(functools.partial(attend, x))() for x in (op, in_float32))
    np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16))


@pytest.mark.slow
def test_random_requests():
    rng = np.random.default_rng(0)
    for seed, window, softcap in itertools.product(range(6), (None, 40), (None, 5.0)):
        singles, chunks = rng.integers(0, 4), rng.integers(0, 3)
        chunk = int(rng.integers(1, 70))
        lengths = [*rng.integers(1, 900, singles), *(chunk + rng.integers(0, 500, chunks))]
        if lengths:
            requests = (int(singles), int(chunks), chunk, [int(n) for n in lengths])
            assert error(call(requests, window=window, softcap=softcap, seed=seed)) < 1e-5


def test_requests_that_nobody_has():
    op = call((2, 1, 4, [9, 0, 0]))
    result = np.asarray(jax.jit(lambda: attend(op))())
    assert np.all(result[1:] == 0), "no key is seen"
    assert np.any(result[0] != 0)


def test_not_a_number_stays_in_its_request():
    op = call((3, 0, 1, [20, 30, 40]))
    query = op.query.at[1].set(jnp.nan)
    broken = jax.jit(lambda: attend(attrs.evolve(op, query=query)))()
    whole = jax.jit(lambda: attend(op))()
    assert np.isnan(broken[1]).all()
    np.testing.assert_array_equal(np.delete(broken, 1, 0), np.delete(whole, 1, 0))


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_token_whose_scores_are_lowest_sees_no_later_ones(chunk):
    """Scores of -1e30 and below count as hidden, as in XLA's kernel. The result is then 0, not the mean of hidden values."""
    op = call((0, 1, chunk, [9]) if chunk > 1 else (1, 0, 1, [9]))
    op = attrs.evolve(op, query=jnp.ones_like(op.query), pages=jnp.abs(jnp.nan_to_num(op.pages)), scale=-1e33)
    assert np.all(np.asarray(jax.jit(lambda: attend(op))()) == 0)


def test_large_scores():
    assert error(attrs.evolve(call("tokens and chunks"), scale=200.0)) < 1e-4, "each softmax is close to one-hot"


def test_a_result_does_not_depend_on_the_other_requests():
    whole = call((3, 0, 1, [20, 600, 40]))
    own = {name: getattr(whole, name)[1:2] for name in ("query", "table", "lengths")}
    one = attrs.evolve(whole, **own, split=Split(1, 1))
    results = [np.asarray(jax.jit(functools.partial(attend, op))()) for op in (whole, one)]
    np.testing.assert_array_equal(results[0][1:2], results[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": 24}, "the head size 24 is not a multiple of 16"),
        (
            {"dtype": "float16"},
            "it needs float32 or bfloat16 queries with float32, bfloat16, int8 pages, got float16 with float16",
        ),
        (
            {"store": "float8_e4m3fn"},
            "it needs float32 or bfloat16 queries with float32, bfloat16, int8 pages, got float32 with float8_e4m3fn",
        ),
        ({"bias": LinearBias((0.5,) * 6)}, "it does not support a bias"),
    ],
)
def test_refusals(changes, reason):
    assert NATIVE.supports(call("three tokens", **changes), CPU).startswith(reason)


def test_without_the_library_xla_attends(monkeypatch):
    monkeypatch.setattr(library, "unavailable_reason", "it was not built")
    chosen = selection.Selection(platform="cpu", gradients=False)
    with selection.use(chosen):
        jax.eval_shape(lambda: call("three tokens").run(None))
    (choice,) = chosen.choices
    assert (choice.name, choice.rejected["native"]) == ("xla-split", "it was not built")


def test_it_is_chosen_on_cpus_alone():
    for platform, name in (("cpu", "native"), ("tpu", "xla-split")):
        chosen = selection.Selection(platform=platform, gradients=False)
        with selection.use(chosen):
            jax.eval_shape(lambda: call("three tokens").run(None))
        assert chosen.choices[0].name == name


def test_shapes_that_do_not_belong_together():
    """The library does not read out of bounds, even if it is called directly."""
    op = call("three tokens")
    wrong_sinks = attrs.evolve(op, sinks=SINKS)
    object.__setattr__(wrong_sinks, "sinks", SINKS[:5])  # the op itself refuses them
    for wrong in (attrs.evolve(op, query=op.query[:2]), wrong_sinks):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the shapes of the operands do not match"):
            jax.block_until_ready(jax.jit(lambda wrong=wrong: attend(wrong))())
    for shape, dtype, sums in (((1,), "float32", 0), (op.query.shape, "bfloat16", 0), (op.query.shape, "float32", 1)):
        results = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((sums,), jnp.float32)
        to = jax.ffi.ffi_call("axlearn_paged_attention", results)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the shapes of the operands do not match"):
            jax.block_until_ready(jax.jit(lambda to=to: to(*operands(op), **ATTRIBUTES))())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the processor lacks these instructions"):
        jax.block_until_ready(jax.jit(lambda: attend(op, 4))())
