"""Engines on several devices give the results of one device."""

import math
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError, RequestError
from axlearn_plugins_serving import engine_devices
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import VIRTUAL_DEVICES, serving_program
from axlearn_plugins_transformer.generate import Generator
from support.paths import HF_FIXTURES
from support.serving_models import SMALL, prompts

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
SIZES = {
    "runner.max_rows": 3, "runner.max_context": 96, "runner.row_buckets": (), "runner.chunk_buckets": (),
    "runner.max_step_tokens": 16, "runner.chunk": 16, "runner.num_blocks": 12,
}  # fmt: skip


def model(**changes):
    sizes = {"model.decoder.layer.attention.num_kv_heads": 4, **changes}
    return ax.resolve("quickstart", set={**SMALL, **sizes}).config.model


def count(config, node=None):
    program = serving_program(node or model(), Mesh(), config)
    assert program.layout.mesh.shape["tensor"] == program.layout.mesh.size
    return program.layout.mesh.size


def config(**changes):
    return patch(ServingEngine.Config(), {**SIZES, **changes})


def test_two_cpu_devices_share_products_by_default():
    assert count(config()) == VIRTUAL_DEVICES == 2


@pytest.mark.parametrize(
    "changes",
    [{"runner.mode": "parity"}, {"runner.decode_steps": 4}, {"tensor_parallel": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_one_device_where_sums_or_loops_would_differ(changes):
    assert count(config(**changes)) == 1


def test_one_device_where_two_do_not_divide_the_model():
    odd = {"model.decoder.layer.attention.num_heads": 3, "model.decoder.layer.attention.num_kv_heads": 3}
    odd |= {"model.decoder.layer.attention.head_dim": 8}
    assert count(config(), model(**odd)) == 1
    with pytest.raises(
        ConfigError,
        match=r"2 devices cannot split the matrix multiplications of this model\n.*dimension .* is not divisible",
    ):
        count(config(tensor_parallel=2), model(**odd))


def test_one_device_for_latents():
    latents = ax.resolve("quickstart", set=SMALL, with_=["mla"]).config.model
    assert count(config(), latents) == 1


def test_more_devices_than_there_are():
    most = jax.device_count()
    with pytest.raises(
        RequestError, match=f"tensor_parallel={most + 1} needs {most + 1} devices\n    got: {most} x cpu"
    ):
        count(config(tensor_parallel=most + 1))


def test_the_mesh_of_the_training_does_not_matter():
    program = serving_program(model(), Mesh(shape={"data": 64}, rules={"activation_embed": ("tensor",)}), config())
    assert dict(program.mesh.shape) == {"tensor": 2}
    assert program.mesh.rules == {"activation_embed": ("tensor",)}


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", [2, 4])
def test_devices_that_share_products_give_the_tokens_of_one(number, transposed, monkeypatch):
    monkeypatch.setattr("axlearn_plugins_serving.serving_linear.stores_transposed", lambda model, devices: transposed)
    cfg = config(tensor_parallel=number)
    built = model().build(rngs=nnx.Rngs(0))
    program = serving_program(model(), Mesh(), cfg)
    some = prompts(np.random.default_rng(0), built.vocab_size)
    with ax.serve(built, program=program, config=cfg) as engine:
        runner = engine.engine.runner
        assert runner.program.layout.mesh.size == number
        name = "attention.output.matrix" if transposed else "attention.output.weight"
        weight = next(w for path, w in runner.weights.arrays.items() if path.endswith(name))
        split = weight.addressable_shards[0].data.shape
        assert weight.ndim == (2 if transposed else 3)
        assert np.prod(split) * number == weight.size, "each device holds a different shard"
        outputs = [result.samples[0].tokens for result in engine.generate(some, max_tokens=8, temperature=0)]
    generator = Generator(built)
    for prompt, output in zip(some, outputs, strict=True):
        assert list(output) == list(generator(prompt, max_tokens=8))


@pytest.mark.slow
def test_seeded_samples_and_prompt_scores_match_one_device():
    built = model().build(rngs=nnx.Rngs(0))
    some = prompts(np.random.default_rng(1), built.vocab_size)
    options = {"temperature": 1.0, "top_p": 0.8, "top_k": 12, "seed": 3, "presence_penalty": 0.5, "logprobs": 2}
    results = []
    for number in (1, 2):
        cfg = config(tensor_parallel=number)
        with ax.serve(built, program=serving_program(model(), Mesh(), cfg), config=cfg) as engine:
            results.append(engine.generate(some, max_tokens=8, prompt_logprobs=True, **options))
    assert any(result.prompt_logprobs for result in results[0])
    for one, two in zip(*results, strict=True):
        assert one.samples[0].tokens == two.samples[0].tokens
        values = [[x.logprob for x in (result.prompt_logprobs or ())] for result in (one, two)]
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.slow
def test_devices_keep_their_pages_to_themselves():
    built, cfg = model().build(rngs=nnx.Rngs(0)), config(**{"tensor_parallel": 2, "runner.num_blocks": 400})
    with ax.serve(built, program=serving_program(model(), Mesh(), cfg), config=cfg) as engine:
        runner = engine.engine.runner
        program = runner.program.compile("serve", runner.buckets[-1]).as_text()
        sent = re.findall(r"= f32\[([\d,]+)\]\S* all-(?:gather|reduce)", program)
        pages = jax.tree.leaves(runner.cache)[0]
    assert sent
    assert max(math.prod(map(int, shape.split(","))) for shape in sent) < pages.size / 2


def test_a_model_object_stays_on_its_devices():
    built = model().build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match="the model is on 1 devices, but tensor_parallel is 2"):
        ax.serve(built, config=config(tensor_parallel=2))


def test_cores_are_those_of_the_quota(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(engine_devices, "CPU_QUOTA", quota)
    for text, cores in (("50000 100000", 0.5), ("max 100000", None), ("", None)):
        quota.write_text(text)
        count = engine_devices._count_cores()
        assert count == cores if cores else count >= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama2", "qwen3", "gemma2", "mixtral"])
def test_a_directory_is_read_onto_two_devices(family, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(HF_FIXTURES / family, directory)
    outputs = []
    for number in (1, 2):
        settings = {**SIZES, "tensor_parallel": number}
        with ax.serve(directory, set=settings, warm_up=False) as engine:
            assert engine.engine.runner.program.layout.mesh.size == number
            results = engine.generate([[5, 6, 7], [8, 9, 3, 4]], max_tokens=12, temperature=0)
            outputs.append([result.samples[0].tokens for result in results])
            assert engine.statistics().used_blocks == 0
    assert outputs[0] == outputs[1]
