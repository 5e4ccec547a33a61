"""Text settings of a model directory are read from every file that may state them, and written by an export."""

import json
import shutil
from pathlib import Path

import pytest

from axlearn_core.errors import ConfigError
from axlearn_plugins_models.huggingface.export_text import complete_text_files, model_settings
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.huggingface.text_facts import context_length
from axlearn_plugins_transformer.text.chat_template import TOOL_TEMPLATE, ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor
from support.paths import HF_FIXTURES

QWEN = HF_FIXTURES / "qwen3"


@pytest.fixture
def directory(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(QWEN, folder)
    data = json.loads((folder / "config.json").read_text())
    del data["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def write(folder, name, **data):
    (folder / name).write_text(json.dumps(data))


def end(folder):
    source = open_model(folder)
    return source.config.input.tokenizer.eos, " ".join(source.notes)


def test_of_generation_config(directory):
    write(directory, "generation_config.json", eos_token_id=[7, 5])
    token, notes = end(directory)
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab[token] == 7
    assert "ends a text" not in notes


def test_tokenizer_config_says_which_of_several_ends_an_answer(directory):
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    five = next(t for t, i in vocab.items() if i == 5)
    write(directory, "generation_config.json", eos_token_id=[7, 5])
    write(directory, "tokenizer_config.json", eos_token={"content": five})
    assert end(directory)[0] == five


def test_tokenizer_config_alone(directory):
    write(directory, "tokenizer_config.json", eos_token="<s>")
    assert end(directory)[0] == "<s>"


@pytest.mark.slow_cases("1000000000000", "True", "value6")
@pytest.mark.parametrize("value", [None, [], "2", True, -1, 10**12, {"a": 1}])
def test_no_file_names_one(directory, value):
    write(directory, "generation_config.json", eos_token_id=value)
    write(directory, "tokenizer_config.json", eos_token="not in the vocabulary")
    token, notes = end(directory)
    assert token is None
    assert "no file names the token that ends a text" in notes


def facts(folder):
    source = open_model(folder)
    return source.config.text, " ".join(source.notes)


def change_config(folder, **data):
    old = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", **{**old, **data})


def test_end_tokens_are_those_of_both_files(directory):
    change_config(directory, eos_token_id=[2, 7])
    write(
        directory, "generation_config.json", eos_token_id=[7, 5], temperature=0.6, top_k=20, top_p=0.95, do_sample=True
    )
    text, _ = facts(directory)
    assert text.end_tokens == (2, 7, 5)
    assert text.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert text.context_length == 128


def test_greedy_files_and_settings_that_nothing_applies(directory):
    write(directory, "generation_config.json", eos_token_id=2, do_sample=False, top_p=0.9, repetition_penalty=1.05)
    text, notes = facts(directory)
    assert text.sampling == {"temperature": 0.0, "repetition_penalty": 1.05}
    assert "repetition_penalty" not in notes
    write(directory, "generation_config.json", eos_token_id=2, do_sample=False, repetition_penalty=0)
    text, notes = facts(directory)
    assert text.sampling == {"temperature": 0.0}
    assert "ignored unsupported sampling settings: repetition_penalty 0" in notes


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_repetition_penalty_survives_an_export(directory, do_sample):
    settings = {"eos_token_id": 2, "do_sample": do_sample, "repetition_penalty": 1.05}
    write(directory, "generation_config.json", **settings)
    processor = text_processor(open_model(directory).config)
    assert exported(processor)["generation_config.json"] == settings
    written = exported(processor, contents={"generation_config.json": b'{"eos_token_id": 2}'})["generation_config.json"]
    assert written == ({"temperature": 1.0} if do_sample else {}) | settings


def test_a_repetition_penalty_of_1_is_not_a_default(directory):
    write(directory, "generation_config.json", eos_token_id=2, do_sample=True, repetition_penalty=1.0)
    processor = text_processor(open_model(directory).config)
    assert processor.sampling == {"temperature": 1.0}
    assert exported(processor, contents=stored_files(directory))["generation_config.json"]["repetition_penalty"] == 1.0


def write_pooling(folder, path="1_Pooling", **modes):
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": path, "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / path).mkdir(exist_ok=True)
    write(folder / path, "config.json", word_embedding_dimension=64, include_prompt=True, **modes)


@pytest.mark.parametrize(
    ("mode", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last"), ("cls_token", "cls"), ("max_tokens", None)]
)
def test_the_pooling_of_a_model_is_read(directory, mode, pooling):
    assert facts(directory)[0].pooling is None
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    write_pooling(directory, **modes)
    text, notes = facts(directory)
    assert text.pooling == pooling
    assert ("ignored unsupported pooling: max_tokens" in notes) == (pooling is None)


def test_poolings_that_are_joined_or_elsewhere_are_not_used(directory):
    write_pooling(directory, pooling_mode_cls_token=True, pooling_mode_mean_tokens=True)
    text, notes = facts(directory)
    assert text.pooling is None
    assert "ignored unsupported pooling: cls_token and mean_tokens" in notes
    modules = [{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    assert "the folder '../1_Pooling' has no config.json" in facts(directory)[1]


def test_sampling_without_a_temperature_has_one_of_1(directory):
    write(directory, "generation_config.json", eos_token_id=2, do_sample=True, top_k=64)
    text, _ = facts(directory)
    assert text.sampling == {"temperature": 1.0, "top_k": 64}
    assert exported(text_processor(open_model(directory).config), contents=stored_files(directory)) == {
        **{name: json.loads(content) for name, content in stored_files(directory).items()},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "bos_token": "<s>",
        },
    }


@pytest.mark.parametrize("side", ["Left", "Right"])
def test_a_tokenizer_that_fills_up_and_cuts_texts_has_the_same_bos(directory, side):
    data = json.loads((directory / "tokenizer.json").read_text())
    pad = {"pad_id": 2, "pad_type_id": 0, "pad_token": "</s>", "pad_to_multiple_of": None}
    cut = {"max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 16}, "direction": side, **pad}
    write(directory, "tokenizer.json", **{**data, "padding": padding, "truncation": {"direction": side, **cut}})
    text = text_processor(open_model(directory).config)
    assert text.tokenizer.bos_token == "<s>"
    ids = text.encode_prompt("w1 w2")
    again = exported(text)["tokenizer.json"]
    assert (again["padding"], again["truncation"]["max_length"]) == (padding, 1)
    assert text.output_text((), ids) == text.tokenizer.decode(ids)


def test_contradicting_files_are_named_with_the_value_in_use(directory):
    change_config(directory, eos_token_id=2, bos_token_id=9, dtype="bfloat16", torch_dtype="float32")
    write(directory, "tokenizer_config.json", eos_token="<s>", chat_template="one")
    (directory / "chat_template.jinja").write_text("two")
    _, notes = facts(directory)
    assert "tokenizer_config.json ends a text with '<s>' (id 1)" in notes
    assert "config.json begins a text with the id 9, but tokenizer.json with '<s>' (id 1); using the latter" in notes
    assert "config.json has dtype bfloat16 and torch_dtype float32; using bfloat16" in notes
    assert "different chat templates; using chat_template.jinja" in notes


def add_token(folder, content, index):
    data = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"].append({"id": index, "content": content, "special": True, **flags})
    write(folder, "tokenizer.json", **data)


def test_added_tokens_without_rows_are_named(directory):
    write(directory, "generation_config.json", eos_token_id=2)
    add_token(directory, "<|image|>", 96)
    _, notes = facts(directory)
    assert "the model has 96 rows and none for the added tokens '<|image|>' (96)" in notes


def test_tokens_that_the_tokenizer_lacks_are_named(directory):
    added = {"1": {"content": "<s>"}, "95": {"content": "<|new|>"}}
    write(directory, "tokenizer_config.json", eos_token="</s>", added_tokens_decoder=added)
    _, notes = facts(directory)
    assert (
        "tokenizer_config.json adds the tokens '<|new|>', but tokenizer.json does not have them; they are encoded as text"
        in notes
    )


def test_a_base_vocabulary_without_rows_is_refused(directory):
    change_config(directory, vocab_size=90)
    with pytest.raises(ConfigError, match="more tokens than the model"):
        facts(directory)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
    ],
)
def test_context_lengths_count_rope_scaling(config, length):
    assert context_length(config) == length


@pytest.fixture
def run_text(directory):
    """Return the text of a run whose tokenizer is in a directory with a chat template."""
    write(directory, "generation_config.json", eos_token_id=[2, 7], temperature=0.5, do_sample=True)
    write(
        directory, "tokenizer_config.json", eos_token="</s>", chat_template="T", pad_token="</s>", model_max_length=77
    )
    return text_processor(open_model(directory).config)


def stored_files(folder):
    return {name: (folder / name).read_bytes() for name in ("generation_config.json", "tokenizer.json")}


def exported(text, config=None, contents=None):
    contents = {} if contents is None else contents
    complete_text_files(text, config or {}, contents)
    return {n: c if n.endswith(".jinja") else json.loads(c) for n, c in contents.items()}


def test_an_export_carries_the_facts_of_a_run(run_text):
    config = model_settings(run_text, length=64)
    assert config == {"eos_token_id": [2, 7], "bos_token_id": 1, "max_position_embeddings": 128}
    folder = Path(run_text.tokenizer.folder)
    files = exported(run_text, config)
    assert files["generation_config.json"] == json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    files = exported(run_text, config)
    assert files["tokenizer_config.json"]["chat_template"] == "T"
    assert files["tokenizer_config.json"]["model_max_length"] == 77
    assert files["generation_config.json"] == {
        "eos_token_id": [2, 7],
        "bos_token_id": 1,
        "temperature": 0.5,
        "do_sample": True,
    }
    assert "tokenizer.json" in files


def test_an_export_has_the_template_that_was_trained_with(run_text, tmp_path):
    (tmp_path / "mine.jinja").write_text("MINE")
    trained = ChatTemplate.Config(path=str(tmp_path / "mine.jinja"))
    text = TextProcessor.Config(template=trained).build(tokenizer=run_text.tokenizer)
    files = exported(text)
    assert files["chat_template.jinja"] == b"MINE"
    assert "chat_template" not in files["tokenizer_config.json"]


def test_a_model_that_lent_its_tokenizer_does_not_say_how_to_generate(run_text):
    text = TextProcessor.Config().build(tokenizer=run_text.tokenizer)
    assert "generation_config.json" not in exported(text, model_settings(text, length=64))


def test_an_export_has_the_template_for_tools(run_text, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("MINE")
    (tmp_path / TOOL_TEMPLATE).parent.mkdir()
    (tmp_path / TOOL_TEMPLATE).write_text("TOOLS")
    trained = ChatTemplate.Config(path=str(tmp_path / "chat_template.jinja"))
    files = exported(TextProcessor.Config(template=trained).build(tokenizer=run_text.tokenizer))
    assert files[TOOL_TEMPLATE] == b"TOOLS"
    (tmp_path / TOOL_TEMPLATE).unlink()
    text = TextProcessor.Config(template=trained).build(tokenizer=run_text.tokenizer)
    assert TOOL_TEMPLATE not in exported(text, contents={TOOL_TEMPLATE: b"OLD"})


def test_files_that_say_the_same_stay_as_they_are(run_text):
    originals = {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template":   "T", "eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "X"}',
        "generation_config.json": b'{"eos_token_id": [2,   7], "temperature": 0.5}',
    }
    contents = dict(originals)
    complete_text_files(run_text, {"eos_token_id": 2}, contents)
    assert contents == originals


def test_a_tokenizer_puts_in_front_what_the_run_does(run_text):
    import tokenizers

    run_text.tokenizer.bos_token = run_text.tokenizer.bos_id = None  # a run that was trained without it
    contents = {}
    complete_text_files(run_text, {}, contents)
    written = tokenizers.Tokenizer.from_str(contents["tokenizer.json"].decode())
    assert written.encode("a").ids == written.encode("a", add_special_tokens=False).ids
