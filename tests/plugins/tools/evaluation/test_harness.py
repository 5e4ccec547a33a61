"""lm-evaluation-harness drives a model in this process, on tasks defined by local files. Needs `lm-eval`."""

import json
import math

import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_plugins_tools.evaluation.data import read
from axlearn_plugins_tools.evaluation.evaluate import evaluate
from axlearn_plugins_tools.evaluation.subjects import subject
from axlearn_plugins_transformer.text import ByteTokenizer
from axlearn_plugins_transformer.text.processor import TextProcessor
from support.needs import require

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of its many imports

SIZES = {
    "model.vocab_size": 257,
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
}


@pytest.fixture(scope="module")
def quickstart_model():
    model = ax.resolve("quickstart", set=SIZES).config.model.build(rngs=nnx.Rngs(0))
    model.decoder.head.weight[...] = model.decoder.head.weight[...] * 20
    return subject(model, TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build()), length=48)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three tasks over files of ours: questions, texts, and text to be written."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    harness = require("lm_eval")
    words = ["a", "bb", "ccc ddd", "e" * 12, "f g"]
    questions = [
        {"prompt": f"Is {i} it?", "choices": [words[i % 5], words[(i + 1 + i % 3) % 5]], "answer": i % 2}
        for i in range(12)
    ]
    texts = [{"text": f"Some text, number {i}, that is longer than a row of the model has tokens."} for i in range(3)]
    for name, rows in (("questions", questions), ("texts", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def task(name, file, **more):
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{file}.jsonl")}}}
        return {"task": name, **data, "test_split": "test", **more}

    yamls = [
        task("asked", "questions", output_type="multiple_choice", doc_to_text="{{prompt}}", doc_to_choice="{{choices}}",
             doc_to_target="{{answer}}", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}]),
        task("rolled", "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
             metric_list=[{"metric": "bits_per_byte"}]),
        task("written", "questions", output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{choices[0]}}",
             generation_kwargs={"until": ["\n"], "max_gen_toks": 6}, metric_list=[{"metric": "exact_match"}]),
    ]  # fmt: skip
    return harness, {t["task"]: t for t in yamls}, tmp_path


def test_the_harness_gets_the_numbers_of_axlearn_evaluate(quickstart_model, tasks):
    from axlearn_plugins_tools.evaluation.harness import AxlearnLM

    harness, limits, folder = tasks
    actual = harness.simple_evaluate(
        model=AxlearnLM(quickstart_model), tasks=list(limits.values()), bootstrap_iters=0, log_samples=True
    )
    results = actual["results"]
    questions = evaluate(quickstart_model, read(str(folder / "questions.jsonl")))
    assert results["asked"]["acc,none"] == questions["accuracy"]
    assert results["asked"]["acc_norm,none"] == questions["accuracy_normalized"]
    texts = evaluate(quickstart_model, read(str(folder / "texts.jsonl")))
    assert math.isclose(results["rolled"]["bits_per_byte,none"], texts["bits_per_byte"], rel_tol=1e-5)
    written = [s["resps"][0][0] for s in actual["samples"]["written"]]
    assert len(written) == 12
    assert all(len(t) <= 6 and "\n" not in t for t in written)


def test_chat_templates_and_options(quickstart_model, tasks):
    from axlearn_core.errors import RequestError
    from axlearn_plugins_tools.evaluation.harness import AxlearnLM

    lm = AxlearnLM(quickstart_model)
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "User:\nhi\n\nAssistant:\n"
    assert "endgeneration" in lm.chat_template()
    assert lm.tokenizer_name.startswith("utf-8 bytes-")
    one = lm._generate_for("ab", {"max_gen_toks": 12, "do_sample": False})
    stop = next(c for c in one[1:] if c not in one[0] + "\ufffd")  # what stands for half a character ends none
    assert lm._generate_for("ab", {"max_gen_toks": 12, "until": stop}) == one.partition(stop)[0]
    assert lm._generate_for("ab", {"max_gen_toks": 3, "do_sample": True, "temperature": 1e3, "top_k": 9}) != one[:3]
    with pytest.raises(RequestError, match="generation does not support num_beams"):
        lm._generate_for("ab", {"num_beams": 4})


def test_texts_generated_in_a_batch_equal_those_generated_one_by_one(quickstart_model, monkeypatch):
    require("lm_eval")
    from lm_eval.api.instance import Instance

    from axlearn_plugins_tools.evaluation.harness import AxlearnLM

    options = [{"until": ["e"], "max_gen_toks": 12}, {"max_gen_toks": 7}, {"until": "zz", "max_gen_toks": 30}]
    requests = [
        Instance("generate_until", {}, (f"Number {i} " * (i % 4), options[i % 3]), i) for i in range(12)
    ]  # fmt: skip
    for request in requests:
        request.args[1]["do_sample"] = False
    together = AxlearnLM(quickstart_model)
    actual = together.generate_until(requests)
    assert together._engine.statistics().steps < 80
    monkeypatch.setenv("AXLEARN_PLUGINS", "-functions:serve")
    alone = AxlearnLM(quickstart_model)
    assert alone.generate_until(requests) == actual
    assert alone._engine is None
    assert all("e" not in text for text in actual[::3])
