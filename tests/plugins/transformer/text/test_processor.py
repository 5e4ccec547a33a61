"""The text processor of a model: documents, prompts, conversations and outputs."""

import datetime
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_transformer.text import ByteTokenizer, LanguageModelInput, TokenizerJson
from axlearn_plugins_transformer.text.chat_template import TOOL_TEMPLATE, ChatTemplate
from axlearn_plugins_transformer.text.messages import normalize_messages
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.records import Document
from axlearn_plugins_transformer.text.text_stream import sampling_defaults

BOS, EOS, END, EXTRA = 256, 257, 258, 259
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a byte-level tokenizer whose post-processor prepends `<s>`, with a chat template next to it."""
    place = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>", "<|extra|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(place / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    (place / "tokenizer_config.json").write_text(json.dumps(facts))
    return place


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TokenizerJson.Config(path=str(folder / "tokenizer.json"), bos="<s>", eos="</s>").build()


@pytest.fixture(scope="module")
def text(tokenizer):
    return TextProcessor.Config(end_tokens=(END,), sampling={"temperature": 0.5}, context_length=64).build(
        tokenizer=tokenizer
    )


def test_a_prompt_gets_one_bos_and_its_special_tokens(text):
    hi = text.tokenizer.encode("hi")
    assert text.encode_prompt("hi") == [BOS, *hi]
    assert text.encode_prompt("<s>hi<|end|>") == [BOS, *hi, END]
    assert text.encode_prompt("") == [BOS]


def test_a_document_keeps_special_tokens_as_text(text):
    ids = text.encode_document("hi<|end|>")
    assert END not in ids
    assert text.tokenizer.decode(ids) == "hi<|end|>"


def test_a_rendered_conversation_gets_no_second_bos(text):
    ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [BOS, *text.tokenizer.encode("user:hi"), END]
    assert text.encode_prompt("<s>user:hi<|end|>") == ids


def test_a_tokenizer_without_bos_begins_with_nothing():
    text = TextProcessor.Config().build(tokenizer=ByteTokenizer.Config().build())
    assert text.encode_prompt("a") == [97]
    assert text.encode_prompt("") == [256]  # at least one token
    assert (text.prompt_prefix, text.document_prefix) == ((), (256,))
    assert not text.has_template


def test_a_continuation_is_split_at_the_context(text):
    before, after = text.encode_continuation("a b ", "c")
    assert before == [BOS, *text.tokenizer.encode("a b")]
    assert text.tokenizer.decode(after) == " c"


def test_end_tokens_defaults_and_limits(text):
    assert text.end_tokens == {EOS, END}
    assert text.sampling == {"temperature": 0.5}
    assert text.context_length == 64


def test_a_stop_string_may_be_a_special_token(text):
    ids = [*text.tokenizer.encode("yes"), END, *text.tokenizer.encode("no")]
    assert text.output_text([BOS], ids) == "yesno"
    assert text.output_text([BOS], ids, ["<|end|>"]) == "yes"
    assert text.output_text([BOS], ids, ["s<|end|>n"]) == "ye"
    assert text.output_text([BOS], ids, ["sn"]) == "ye"  # the output never contains a stop string


def test_offsets_index_into_the_text_that_is_returned(text):
    prompt = "é<|end|>b"
    ids = text.encode_prompt(prompt)
    shown, starts = text.prompt_offsets(ids, prompt)
    assert shown == prompt
    assert [prompt[i : i + 1] for i in starts] == ["é", "é", "é", "<", "b"]  # BOS, both bytes of é, the token, b
    shown, starts = text.prompt_offsets(ids)
    assert (shown, starts[0], starts[-1]) == ("éb", 0, 1)


def test_requests_get_the_date_and_training_a_fixed_one(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja"))
    text = TextProcessor.Config(template=template).build(tokenizer=tokenizer)
    days = {str(datetime.date.today())}
    shown = text.template.render([]).text
    days.add(str(datetime.date.today()))  # around midnight
    assert shown in days
    assert text.data_template.render([]).text == "2024-07-26"


def test_the_plain_template_can_be_asked_for(tokenizer):
    assert TextProcessor.Config().build(tokenizer=tokenizer).template.source == CHAT
    text = TextProcessor.Config(template=ChatTemplate.Config(plain=True)).build(tokenizer=tokenizer)
    assert text.has_template
    assert text.template.render([{"role": "user", "content": "hi"}]).text == "User:\nhi\n\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 1 }}\n{% for m in messages %}", "line 2: Unexpected end of template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_a_template_that_is_not_valid_jinja(source, says, tokenizer, tmp_path):
    (tmp_path / "broken.jinja").write_text(source)
    broken = ChatTemplate.Config(path=str(tmp_path / "broken.jinja")).build(tokenizer=tokenizer)
    with pytest.raises(InputError, match=says):
        broken.check_syntax()


def test_templates_by_name_take_the_one_for_tools(tokenizer, tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.Config(path=str(tmp_path / "tokenizer_config.json")).build(tokenizer=tokenizer)
    assert template.render([]).text == "plain"
    assert template.render([], tools=[{}]).text == "tools 1"


def test_a_template_for_tools_may_have_a_file_of_its_own(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / TOOL_TEMPLATE).parent.mkdir()
    (tmp_path / TOOL_TEMPLATE).write_text("tools {{ tools | length }}")
    template = ChatTemplate.Config(path=str(tmp_path / "chat_template.jinja")).build(tokenizer=tokenizer)
    assert template.render([]).text == "plain"
    assert template.render([], tools=[{}]).text == "tools 1"


def test_templates_read_the_special_tokens_of_every_file(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }} {{ pad_token }} {{ image_token }}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<old>", "pad_token": {"content": "<p>"}})
    )
    facts = {"bos_token": "<s>", "extra_special_tokens": {"image_token": "<|extra|>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja")).build(tokenizer=tokenizer)
    assert template.render([]).text == "<s> <p> <|extra|>"


def test_tools_keep_their_field_order_and_drop_null_fields(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    )
    template = ChatTemplate.Config(path=str(tmp_path / "t.jinja")).build(tokenizer=tokenizer)
    parameters = {"type": "object", "properties": {"a": {"default": None}}}
    tool = {"function": {"parameters": parameters, "name": "f", "strict": None}, "type": "function"}
    call = {"function": {"arguments": None, "name": "f", "parsed": None}, "id": "1", "index": None}
    shown = template.render([{"role": "assistant", "tool_calls": [call]}], tools=[tool]).text
    tools = [{"function": {"parameters": parameters, "name": "f"}, "type": "function"}]
    calls = [{"function": {"arguments": None, "name": "f"}, "id": "1"}]
    assert shown == json.dumps(tools) + json.dumps(calls)


def test_a_temperature_keeps_the_other_defaults_of_the_model(tokenizer):
    sampling = {"temperature": 0.5, "top_k": 20.0, "top_p": 0.9}
    text = TextProcessor.Config(sampling=sampling).build(tokenizer=tokenizer)
    assert sampling_defaults(text, None) == sampling
    assert sampling_defaults(text, 0.7) == {**sampling, "temperature": 0.7}
    assert type(sampling_defaults(text, None)["top_k"]) is int  # functions are compiled for it


def test_messages_are_brought_into_the_form_of_templates():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": "{oops"}}]},
    ]
    first, second, third, fourth = normalize_messages(messages)
    assert first == {"role": "user", "content": "ab"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert third == {"role": "assistant", "content": "x"}
    assert fourth["tool_calls"][0]["function"]["arguments"] == "{oops"  # a model wrote it
    assert call["function"]["arguments"] == '{"city": "Rome"}'  # the caller's own stays


def test_the_plain_template_renders_tool_calls():
    template = ChatTemplate.Config().build(tokenizer=ByteTokenizer.Config().build())
    call = {"function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    talk = [{"role": "user", "content": "w"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rendered = template.render_answers(talk)
    (answer,) = rendered.answers
    assert json.loads(rendered.text[answer.start : answer.stop - 1]) == {"name": "f", "arguments": {"city": "Rome"}}


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"end_tokens": (-1,)}, "end_tokens.0"),
        ({"sampling": {"temprature": 1.0}}, "temperature"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ],
)
def test_facts_that_cannot_be_are_refused(settings, path):
    problems = list(TextProcessor.Config(**settings).validate())
    assert path in str(ConfigError(problems))


def rows(tokenizer_config, text, vocab_size=None, **settings):
    from axlearn_plugins_transformer.text.sources import Files

    cfg = LanguageModelInput.Config(
        batch_size=1,
        sequence_length=32,
        source=Files.Config(paths=__file__),
        tokenizer=tokenizer_config,
        **settings,
    )
    return cfg.build(vocab_size=vocab_size).example(Document(text))


def test_documents_begin_with_bos_and_end_with_eos(folder, tokenizer):
    config = TokenizerJson.Config(path=str(folder / "tokenizer.json"), bos="<s>", eos="</s>")
    ids = tokenizer.encode("hi<|end|>")
    example = rows(config, "hi<|end|>")
    assert example[:, 0].tolist() == [BOS, *ids]
    assert example[:, 1].tolist() == [*ids, EOS]
    parsed = rows(config, "<s>hi<|end|>", special_tokens="parse")
    assert parsed[:, 0].tolist() == [BOS, *tokenizer.encode("hi"), END]  # one BOS


def test_only_tokenizers_that_can_parse_special_tokens_are_asked_to():
    with pytest.raises(ConfigError, match=r"input\.special_tokens"):
        rows(ByteTokenizer.Config(), "a", special_tokens="parse")


def test_added_tokens_without_rows_are_accepted_until_a_text_uses_one(folder):
    config = TokenizerJson.Config(path=str(folder / "tokenizer.json"), bos="<s>", eos="</s>")
    assert rows(config, "hi", vocab_size=EXTRA, special_tokens="parse") is not None
    with pytest.raises(InputError, match=r"'<\|extra\|>', id 259"):
        rows(config, "hi<|extra|>", vocab_size=EXTRA, special_tokens="parse")
    with pytest.raises(ConfigError, match="less than the 260 ids"):  # the end token is needed
        rows(config, "hi", vocab_size=EOS)
