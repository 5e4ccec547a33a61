"""The mode `parity`: log-probabilities of steps equal the training program's `score` bit for bit in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_serving.parity import NARROW_MAP_ROWS, NARROW_OUTPUTS, ROWS, WIDE_MAP_ROWS, min_rows
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.kernels.hooks import axlearn_kernels
from support.score_parity import Scores, check_parity_scores
from support.serving_models import SIZES, config, model, prompts


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), ("alibi",), ("interleave",)], ids=str)
def test_log_probabilities_are_bitwise_those_of_training(features):
    check_parity_scores(config(*features), model(*features))


LORA = "lora:target=model.**"
FAMILIES = [("moe",), ("mla",), (LORA,), ("mla", "moe"), ("moe:top_k=4", LORA), ("mla", LORA)]


def trained_model(cfg):
    """Build a model whose adapters have an effect."""
    of = cfg.build(rngs=nnx.Rngs(0))
    for path, value in nnx.to_flat_state(nnx.state(of, nnx.Param)):
        if path[-1] == "lora_b":
            key = jax.random.key(len(path))
            nnx.update(of, nnx.from_flat_state([(path, value.replace(0.1 * jax.random.normal(key, value.shape)))]))
    return of


@pytest.mark.slow
@pytest.mark.parametrize("features", FAMILIES, ids=str)
def test_experts_latents_and_adapters_are_bitwise_those_of_training(features):
    cfg = config(*features)
    check_parity_scores(cfg, trained_model(cfg), seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("features", [(), *FAMILIES[:3]], ids=str)
def test_an_engine_that_preempts_and_reuses_prefixes_is_bitwise(features):
    """Log-probabilities of sampled tokens, with blocks for half of the requests and prompts that share their start."""
    cfg = config(*features)
    of, rng = trained_model(cfg), np.random.default_rng(0)
    start = rng.integers(0, 64, 9).tolist()
    some = [[*start, *rng.integers(0, 64, n).tolist()] for n in (1, 3, 6, 2)]
    scores, settings = Scores(cfg, of), {f"runner.{name}": value for name, value in SIZES.items()}
    with serve(of, set={**settings, "runner.mode": "parity", "runner.num_blocks": 18}, warm_up=False) as engine:
        engine.generate([start], max_tokens=1)
        generations = engine.generate(some, n=2, max_tokens=16, temperature=1.0, seed=0)
        assert engine.statistics().preemptions > 0
        assert engine.statistics().cached_prompt_tokens > 0
    for generation in generations:
        for sample in generation.samples:
            tokens = [*generation.prompt, *sample.tokens]
            got = np.asarray([x.logprob for x in sample.logprobs], np.float32)
            assert got.tobytes() == scores(tokens, len(generation.prompt)).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_bitwise_with_maps_that_64_divides(width):
    sizes = {"decoder.layer.attention.num_kv_heads": 4, "decoder.hidden_dim": width, "vocab_size": width}
    sizes["decoder.layer.feed_forward.hidden_dim"] = 2 * width
    cfg = patch(config(), sizes)
    of = cfg.build(rngs=nnx.Rngs(0))
    check_parity_scores(cfg, of, seeds=1)


@pytest.mark.slow
def test_bitwise_with_other_chunks_and_pages():
    check_parity_scores(config(), model(), chunk=5, block_size=16)
    check_parity_scores(config(), model(), chunk=20, block_size=8, max_step_tokens=40)


@pytest.mark.slow
def test_bitwise_with_a_vocabulary_and_chunks_as_served():
    """Few rows of many logits, alone and with others."""
    sizes = {"decoder.layer.attention.num_kv_heads": 4, "decoder.hidden_dim": 128, "vocab_size": 4096}
    cfg = patch(config(), sizes)
    check_parity_scores(cfg, cfg.build(rngs=nnx.Rngs(0)), seeds=1, chunk=32, max_step_tokens=64, chunk_buckets=(1,))


LARGE_STEPS = {"max_step_tokens": 4608, "chunk": 24, "chunk_buckets": ()}
"""Config in which every step with prompts has 4,608 rows. By default, XLA for CPU uses other algorithms from 4,096 numbers on."""


@pytest.mark.slow
def test_bitwise_in_large_steps():
    check_parity_scores(config(), model(), seeds=1, **LARGE_STEPS)


WIDE = {
    "decoder.layer.attention.num_heads": 12,
    "decoder.layer.attention.num_kv_heads": 4,
    "decoder.layer.feed_forward.hidden_dim": 2048,
    "decoder.hidden_dim": 768,
    "vocab_size": 1024,
}


@pytest.mark.slow
def test_bitwise_with_wide_maps():
    """Wide maps need fewer rows."""
    cfg = patch(config(), WIDE)
    of = cfg.build(rngs=nnx.Rngs(0))
    assert min_rows(of) == 24 < ROWS
    for devices in (1, 2):
        check_parity_scores(cfg, of, seeds=1, devices=devices, max_rows=16, chunk=32, max_step_tokens=128)
        check_parity_scores(cfg, of, seeds=1, devices=devices)
        check_parity_scores(cfg, of, seeds=1, devices=devices, **LARGE_STEPS)


WIDER = {**WIDE, "decoder.layer.attention.num_heads": 16, "decoder.hidden_dim": 1024}


@pytest.mark.slow
def test_bitwise_with_wider_maps():
    """Wider maps need still fewer rows."""
    cfg = patch(config(), WIDER)
    of = cfg.build(rngs=nnx.Rngs(0))
    assert min_rows(of) == 8
    check_parity_scores(cfg, of, seeds=1)
    check_parity_scores(cfg, of, seeds=1, devices=2, max_rows=16, chunk=32, max_step_tokens=128)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_narrow_maps_are_not_divided():
    with pytest.raises(RequestError, match="on 2 devices: XLA sums narrow maps in a different order"):
        check_parity_scores(config(), model(), devices=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 1000}, {"decoder.hidden_dim": 640, "decoder.layer.attention.num_heads": 10}],
    ids=str,
)
def test_other_maps_need_all_rows(change):
    cfg = patch(config(), {**WIDE, "decoder.layer.attention.num_kv_heads": 2, **change})
    assert min_rows(Functional.from_config(cfg).describe()) == ROWS
    assert min_rows(Functional.from_config(patch(config(), WIDE)).describe()) == 24


@pytest.mark.slow
def test_adapters_of_a_small_rank_are_bitwise_those_of_training():
    cfg = config("lora:target=model.**,rank=4")
    assert min_rows(Functional.from_config(cfg).describe()) == NARROW_MAP_ROWS
    assert min_rows(Functional.from_config(config(LORA)).describe()) == ROWS
    check_parity_scores(cfg, trained_model(cfg), seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 4, NARROW_OUTPUTS, NARROW_OUTPUTS + 1])
@pytest.mark.parametrize("inputs", [64, 1024])
def test_rows_of_narrow_products_do_not_depend_on_their_number(inputs, outputs):
    """Check the assumption about XLA on this machine that determines the number of rows."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((512, inputs), (inputs, outputs)))
    rows = NARROW_MAP_ROWS if outputs <= NARROW_OUTPUTS else ROWS
    few, many = (np.asarray(jax.jit(jnp.matmul)(x[None, :count], w))[0] for count in (rows, 512))
    assert few.tobytes() == many[:rows].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [768, 1024, 1280, 2816])
def test_rows_of_products_do_not_depend_on_their_number(inputs):
    """Check the assumptions about XLA on this machine that determine the numbers of rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((320, inputs)).astype(np.float32)
    (kernel,) = (k for k in axlearn_kernels() if k.name == "invariant" and k.op.endswith(":AttentionOp"))
    options = dict(kernel.compiler_options["cpu"])
    mean = jax.jit(lambda x: jax.lax.rsqrt(jnp.mean(x * x, axis=-1)), compiler_options=options)
    product = jax.jit(jnp.matmul, compiler_options=options)
    least = next(rows for least, rows in WIDE_MAP_ROWS.items() if inputs >= least)
    for outputs in (64, 192, 768, 1088, 4096):
        weight = rng.standard_normal((inputs, outputs)).astype(np.float32)
        whole, means = np.asarray(product(x, weight)), np.asarray(mean(x))
        for rows in (least, 25, 31, 33, 40, ROWS, 96, 288):
            assert np.asarray(product(x[:rows], weight)).tobytes() == whole[:rows].tobytes(), (outputs, rows)
            assert np.asarray(mean(x[:rows])).tobytes() == means[:rows].tobytes(), rows


CAPACITY = "moe:dispatch={type: capacity-dispatch}"


@pytest.mark.slow_cases("('moe:dispatch={type: capacity-dispatch}',)-tokens compete")
@pytest.mark.parametrize(
    ("features", "reason"),
    [((CAPACITY,), "tokens compete"), (("precision:dtype=bfloat16",), "bfloat16")],
    ids=str,
)
def test_what_cannot_be_bitwise_is_refused(features, reason):
    with pytest.raises(RequestError, match=reason):
        ModelRunner.Config(**SIZES, mode="parity").build(model=model(*features))


def test_other_kernels_are_refused():
    with pytest.raises(
        RequestError, match=r"supports only the kernel 'invariant'\n    got: serving.runner.kernel=xla-split"
    ):
        ModelRunner.Config(**SIZES, mode="parity", kernel="xla-split").build(model=model())


def test_scores_do_not_depend_on_the_shape_of_the_batch():
    tokens = prompts(np.random.default_rng(0), 64)[3]
    one, other = (Scores(config(), model(), *shape)(tokens, 1) for shape in ((2, 48), (3, 64)))
    assert one.tobytes() == other.tobytes()


def test_pages_that_make_up_no_block_are_refused():
    instance = ModelRunner.Config(**{**SIZES, "block_size": 3, "mode": "parity"}).build(model=model())
    with pytest.raises(RequestError, match="the page size 3 does not divide"):
        instance.warm_up()
