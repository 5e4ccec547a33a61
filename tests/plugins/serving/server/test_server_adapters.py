"""Adapters chosen per request give the tokens of a server with merged weights."""

import functools

import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_serving.settings import add_adapters, engine_config
from axlearn_plugins_transformer.generate import Generator
from support import serving_models

SIZES = {
    "runner.block_size": 4, "runner.max_context": 48, "runner.max_rows": 4, "runner.max_step_tokens": 24,
    "runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip
RANKS = {"small": "lora:rank=2,alpha=8", "large": "lora:rank=5,alpha=5,target=model.decoder.layer.**"}


def base():
    return serving_models.model()


@functools.cache
def adapted(name):
    """Return the parameters and scales of the base model with random adapters."""
    config = serving_models.config(RANKS[name])
    functional, rng = Functional.from_config(config), np.random.default_rng(len(name))
    params = dict(Functional.from_config(serving_models.config()).extract_weights(base()).params)
    for path, spec in functional.abstract.items():
        if adapters.is_adapter(path):
            params[path] = (0.4 * rng.standard_normal(spec.shape)).astype(spec.dtype)
    return params, adapters.scales_of(functional.describe())


@functools.cache
def merged(name):
    functional = Functional.from_config(serving_models.config())
    return functional.bind(adapters.merge(*adapted(name)), {})


@pytest.fixture
def directories(tmp_path):
    for name in RANKS:
        adapters.save(tmp_path / name, *adapted(name))
    return {name: str(tmp_path / name) for name in RANKS}


@pytest.mark.slow
def test_each_request_has_its_own_adapter(directories):
    rng, outputs = np.random.default_rng(0), {}
    prompts = [tuple(rng.integers(0, 64, n).tolist()) for n in (3, 9, 14, 5, 9, 21, 1, 12)]
    names = [None, "small", "large", "small", None, "large", "large", "small"]
    prompts[4] = prompts[1]  # the same prompt with and without an adapter must not share the cache
    with serve(base(), set={**SIZES, "runner.adapters": directories}) as local:
        engine = local.engine
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            sampling = Sampling(temperature=0.0, max_tokens=10)
            engine.add(Request(id=str(index), prompt=prompt, sampling=sampling, adapter=name))
        while engine.busy():
            for output in engine.step():
                outputs.setdefault(output.id, []).extend(output.tokens)
        assert engine.statistics().compilations == 0
    distinct = set()
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        expected = list(Generator(merged(name) if name else base())(prompt, max_tokens=10))
        assert outputs[str(index)] == expected, name
        distinct.add(tuple(expected))
    assert len(distinct) == len(prompts)


@pytest.mark.slow
def test_prompts_are_scored_with_the_adapter_of_their_request(directories):
    prompt = tuple(np.random.default_rng(3).integers(0, 64, 21).tolist())
    options = {"max_tokens": 0, "prompt_logprobs": True}

    def scores(engine, adapter=None):
        [result] = engine.generate([prompt], adapter=adapter, **options)
        return [score.logprob for score in result.prompt_logprobs]

    with serve(base(), set={**SIZES, "runner.adapters": directories}) as local:
        actual = {name: scores(local, name) for name in (None, *directories)}
    for name, values in actual.items():
        with serve(merged(name) if name else base(), set=SIZES) as alone:
            np.testing.assert_allclose(values, scores(alone), atol=1e-4)
    assert not np.allclose(actual["small"], actual["large"], atol=1e-2)


@pytest.mark.slow
def test_weights_may_change_next_to_adapters(directories):
    with serve(base(), set={**SIZES, "runner.adapters": directories}, warm_up=False) as engine:
        (one,) = engine.generate([[5, 6, 7]], adapter="small", max_tokens=6, temperature=0)
        engine.update_weights(merged("large"))
        (other,) = engine.generate([[5, 6, 7]], max_tokens=6, temperature=0)
        engine.update_weights(base())
        (again,) = engine.generate([[5, 6, 7]], adapter="small", max_tokens=6, temperature=0)
    assert one.tokens == again.tokens == tuple(Generator(merged("small"))([5, 6, 7], max_tokens=6))
    assert other.tokens == tuple(Generator(merged("large"))([5, 6, 7], max_tokens=6))


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(directories, tmp_path):
    params, scales = adapted("small")
    changed = {**params, "decoder.layer.attention.query.weight": params["decoder.layer.attention.query.weight"] + 1}
    adapters.save(tmp_path / "changed", changed, scales)
    renamed = {p.replace("attention.query", "attention.question"): x for p, x in params.items()}
    elsewhere = {p.replace("attention.query", "attention.question"): x for p, x in scales.items()}
    adapters.save(tmp_path / "renamed", renamed, elsewhere)
    wide = dict(params)
    path = "decoder.layer.attention.query.lora_b"
    wide[path] = np.concatenate([wide[path]] * 2, axis=-1)
    adapters.save(tmp_path / "wide", wide, scales)
    for name, error in (("changed", "different values"), ("renamed", "no linear map"), ("wide", "on a different base")):
        with pytest.raises(
            RequestError,
            match=f"adapter odd: (?s:.*){error}|adapter odd was trained on a different base: (?s:.*){error}",
        ):
            serve(base(), set={**SIZES, "runner.adapters": {"odd": str(tmp_path / name)}}, warm_up=False)
    with pytest.raises(CheckpointError, match="adapter none"):
        serve(base(), set={**SIZES, "runner.adapters": {"none": str(tmp_path / "none")}}, warm_up=False)
    settings = {**SIZES, "runner.adapters": directories, "runner.mode": "parity"}
    with pytest.raises(RequestError, match="has adapters"):
        serve(base(), set=settings, warm_up=False)


def test_an_unknown_adapter_is_refused(directories):
    engine = serve(base(), set={**SIZES, "runner.adapters": directories}, warm_up=False)
    with engine, pytest.raises(RequestError, match=r"(?s)unknown adapter 'smal'.*did you mean: small"):
        engine.generate([[5]], adapter="smal")


@pytest.mark.parametrize("texts", [["name"], ["=dir"], ["a=x", "a=y"]], ids=str)
def test_the_option_names_a_directory(texts):
    with pytest.raises(RequestError, match=r"NAME=DIR|given twice"):
        add_adapters(engine_config([]), texts)


def test_on_the_command_line_a_wrong_adapter_ends_with_exit_code_2(tmp_path):
    result = CliRunner().invoke(cli, ["serve", str(tmp_path), "--port", "0", "--adapter", "name"])
    assert result.exit_code == 2
    assert "NAME=DIR" in result.output


def test_an_adapter_cannot_have_the_name_of_the_model(tmp_path):
    words = ["serve", str(tmp_path / "base"), "--port", "0", "--adapter", "tuned=dir"]
    result = CliRunner().invoke(cli, [*words, "--served-model-name", "tuned"])
    assert result.exit_code == 2
    assert "--adapter tuned has the same name as the served model" in result.output
    result = CliRunner().invoke(cli, ["serve", str(tmp_path / "tuned"), *words[2:]])
    assert result.exit_code == 2
    assert "--served-model-name" in result.output
