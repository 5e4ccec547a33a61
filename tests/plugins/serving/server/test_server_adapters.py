"""Adapters chosen per request give the tokens of a server with merged weights."""

import functools

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.compose import Functional
from axlearn_core.config import patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.nn.layer import Context
from axlearn_plugins_finetune.lora import adapters
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_weights import model_weights
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_serving.open_engine import build_engine
from axlearn_plugins_serving.settings import add_adapters, engine_config
from axlearn_plugins_transformer.generate import Generator
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer
from support import serving_models
from support.fake_engine import FakeEngine
from support.server_thread import serving

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


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("adapters")
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


@pytest.fixture(scope="module")
def spare():
    """Run a server with room for two adapters, and none loaded."""
    settings = {**SIZES, "runner.adapter_slots": 2, "runner.adapter_rank": 5, "runner.adapter_targets": ("**",)}
    settings |= {"runner.pooling": "last"}
    source = lambda **_: model_weights(Functional.from_config(serving_models.config()), base())  # noqa: E731
    engine = build_engine(base(), config=patch(ServingEngine.Config(), settings), source=source)
    with serving(engine, tokenizer=SmallTokenizer(), allows_adapters=True) as server:
        yield server


class SmallTokenizer(ByteTokenizer):
    """A tokenizer with as many tokens as the model."""

    vocab_size = 64
    eos_id = 63

    def __init__(self):
        super().__init__(ByteTokenizer.Config())


def post(server, path, **body):
    return httpx.post(server.url + path, json=body, timeout=60)


def generate(server, model, prompt=(5, 6, 7), **body):
    fields = {"prompt": list(prompt), "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    response = post(server, "/v1/completions", model=model, **{**fields, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], response.json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


def expected_tokens(name, prompt=(5, 6, 7), count=8):
    return list(Generator(merged(name) if name else base())(list(prompt), max_tokens=count))


@pytest.mark.slow
def test_adapters_are_loaded_and_unloaded_while_the_server_runs(spare, directories):
    prompt = tuple(range(5, 25))
    for name in ("small", "large"):
        assert post(spare, "/v1/load_lora_adapter", lora_name=name, lora_path=directories[name]).status_code == 200
    full = post(spare, "/v1/load_lora_adapter", lora_name="third", lora_path=directories["small"])
    assert (full.status_code, "all 2 slots" in full.json()["error"]["message"]) == (400, True)
    names = [m["id"] for m in httpx.get(spare.url + "/v1/models").json()["data"]]
    assert names == ["tiny", "small", "large"]
    for name, model in ((None, "tiny"), ("small", "small"), ("large", "large")):
        assert generate(spare, model, prompt)[0] == expected_tokens(name, prompt)
    hidden = merged("large").hidden_states({"tokens": np.asarray([prompt], np.int32)}, Context())[0][0, -1]
    embedding = post(spare, "/v1/embeddings", model="large", input=list(prompt)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(embedding, hidden / np.linalg.norm(hidden), atol=1e-4)
    assert generate(spare, "large", prompt)[1] > 0  # its prefix is cached
    for name in ("small", "large"):
        assert post(spare, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert post(spare, "/v1/unload_lora_adapter", lora_name="small").status_code == 404
    assert post(spare, "/v1/completions", model="small", prompt=[1]).status_code == 404
    # A different adapter of the same name must not use the cached prefix.
    post(spare, "/v1/load_lora_adapter", lora_name="large", lora_path=directories["small"])
    assert generate(spare, "large", prompt) == (expected_tokens("small", prompt), 0)
    post(spare, "/v1/unload_lora_adapter", lora_name="large")
    assert spare.engine.statistics().compilations == 0


@pytest.mark.slow
def test_requests_of_an_adapter_finish_before_its_slot_is_free(directories):
    settings = {**SIZES, "runner.adapter_slots": 1, "runner.adapter_rank": 5, "runner.adapter_targets": ("**",)}
    engine = build_engine(base(), config=patch(ServingEngine.Config(), settings), warm_up=False)
    engine.add_adapter("large", engine.read_adapter("large", directories["large"]))
    engine.add(Request(id="a", prompt=(5, 6, 7), sampling=Sampling(temperature=0, max_tokens=8), adapter="large"))
    outputs = list(engine.step())
    engine.remove_adapter("large")
    with pytest.raises(RequestError, match="unknown adapter 'large'"):
        engine.add(Request(id="b", prompt=(5,), adapter="large"))
    with pytest.raises(RequestError, match="requests still use the adapter large"):
        engine.add_adapter("large", None)
    with pytest.raises(RequestError, match="all 1 slots of adapters are in use"):
        engine.add_adapter("small", engine.read_adapter("small", directories["small"]))
    while engine.busy():
        outputs += engine.step()
    assert [t for output in outputs for t in output.tokens] == expected_tokens("large")
    engine.add_adapter("small", engine.read_adapter("small", directories["small"]))
    assert engine.adapters == ("small",)


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_not_loaded(spare, directories, tmp_path):
    params, scales = adapted("small")
    changed = {**params, "decoder.layer.attention.query.weight": params["decoder.layer.attention.query.weight"] + 1}
    adapters.save(tmp_path / "changed", changed, scales)
    wide = {
        p: np.concatenate([x] * 3, axis=-1 if p.endswith("lora_a") else 1) if "lora" in p else x
        for p, x in params.items()
    }
    adapters.save(tmp_path / "wide", wide, scales)
    for path, message in (
        (tmp_path / "changed", "different values"),
        (tmp_path / "wide", "the rank is 6"),
        (tmp_path / "none", "no exported adapters"),
    ):
        response = post(spare, "/v1/load_lora_adapter", lora_name="odd", lora_path=str(path))
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    for body in ({}, {"lora_name": "a"}, {"lora_name": "", "lora_path": "b"}, {"lora_name": "tiny", "lora_path": "b"}):
        assert post(spare, "/v1/load_lora_adapter", **body).status_code == 400
    settings = {**SIZES, "runner.adapter_slots": 1}  # only attention
    engine = build_engine(base(), config=patch(ServingEngine.Config(), settings), warm_up=False)
    with pytest.raises(RequestError, match="without room for adapters of"):
        engine.read_adapter("large", directories["large"])


def test_loading_adapters_is_off_by_default():
    with serving(FakeEngine()) as server:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            response = post(server, path, lora_name="a", lora_path="b")
            assert response.status_code == 404
            assert "--allow-adapters" in response.json()["error"]["message"]


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
