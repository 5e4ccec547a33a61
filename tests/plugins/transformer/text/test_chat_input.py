"""Conversations: templates, weights of tokens, packing, and errors in the data."""

import itertools
import json
import pickle

import numpy as np
import pytest
import tokenizers

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.errors import ConfigError, InputError, RequestError
from axlearn_plugins_transformer.text import (
    ByteTokenizer,
    ChatFiles,
    ChatInput,
    ChatTemplate,
    Files,
    Mixture,
    TokenizerJson,
)
from axlearn_plugins_transformer.text.chat_template import ChatTemplateError, RenderedChat, Span
from axlearn_plugins_transformer.text.conversations import check_conversation

ASK = {"role": "user", "content": "2 + 2?"}
TALK = [
    ASK,
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "ü"},
]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path):
    """Write rows and return the file's name."""
    return lambda *rows: jsonl(tmp_path / "chat.jsonl", *rows)


def config(paths, **settings):
    base = {"batch_size": 2, "sequence_length": 64, "tokenizer": ByteTokenizer.Config()}
    source = settings.pop("source", None) or ChatFiles.Config(paths=paths)
    return ChatInput.Config(**{**base, "source": source, **settings})


def learnt(source, batch):
    """Return the text of the targets that count, by row and segment."""
    rows = []
    for targets, weights, segments in zip(batch["targets"], batch["weights"], batch["segment_ids"], strict=True):
        pairs = [(s, t) for t, w, s in zip(targets, weights, segments, strict=True) if w]
        groups = itertools.groupby(pairs, key=lambda x: x[0])
        rows.append([bytes(t if t < 256 else 36 for _, t in g).decode() for _, g in groups])
    return rows


def first(source):
    batches = source.train()
    try:
        return next(batches)
    finally:
        batches.close()


def words(folder, template=None, **more):
    """Write a word tokenizer with special tokens, in a folder like that of a Hugging Face model."""
    vocab = {
        w: i for i, w in enumerate(["?", "<s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "hi", "yo", "\n"])
    }
    result = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    result.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\n"), "isolated")
    result.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in ("<s>", "<|im_start|>", "<|im_end|>")])
    folder.mkdir(exist_ok=True)
    result.save(str(folder / "tokenizer.json"))
    facts = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts | ({"chat_template": template} if template else {})))
    return TokenizerJson.Config(path=str(folder / "tokenizer.json"))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_roles_that_instruct(role):
    check_conversation({"messages": [{"role": role, "content": "Be kind."}, *GOOD["messages"]]}, "here")


def test_only_answers_count_and_conversations_do_not_see_one_another(file):
    source = config(file(*[{"messages": TALK}] * 4)).build()
    batch = first(source)
    assert learnt(source, batch) == [["4$ü$"], ["4$ü$"]]  # one fits into a row
    row = batch["tokens"][0][batch["segment_ids"][0] > 0]
    text = "User:\n2 + 2?\n\nAssistant:\n4$\n\nUser:\né?\n\nAssistant:\nü$\n\n".encode()
    assert bytes(36 if t == 256 else t for t in row) == text[:-1]
    assert np.array_equal(batch["positions"][0][: len(row)], np.arange(len(row)))

    packed = config(file(*[{"messages": [ASK, TALK[1]]}] * 4), packing="concat", sequence_length=40).build()
    assert "".join(text for row in learnt(packed, first(packed)) for text in row).count("4$") >= 2
    last = config(file(*[{"messages": TALK}] * 4), answers="last").build()
    assert learnt(last, first(last)) == [["ü$"], ["ü$"]]


def test_losses_per_byte_are_over_what_counts(file):
    path = file({"messages": TALK})
    source = config("", source=ChatFiles.Config(validation_paths=path)).build()
    (batch,) = list(source.evaluation())
    assert batch["bytes"].sum() == len("4ü".encode())
    assert batch["weights"].sum() == len("4ü".encode()) + 2


def test_a_template_of_a_model_marks_what_it_renders(tmp_path, file):
    tokenizer = words(tmp_path / "model", CHATML)
    plain = ChatTemplate.Config().build(tokenizer=tokenizer.build())
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yo "}]
    rendered = plain.render_answers(talk)
    assert rendered.text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert [rendered.text[a.start : a.stop] for a in rendered.answers] == ["yo<|im_end|>\n"]
    ids, marks = plain.encode(rendered)
    assert ids == [1, 2, 4, 8, 6, 3, 8, 2, 5, 8, 7, 3, 8]  # special tokens are one token each
    assert [i for i, m in zip(ids, marks, strict=True) if m] == [7, 3, 8]
    assert pickle.loads(pickle.dumps(plain)).render(talk).text == rendered.text

    marked = tmp_path / "marked.jinja"
    marked.write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
    )
    marked_template = ChatTemplate.Config(path=str(marked)).build(tokenizer=ByteTokenizer.Config().build())
    assert marked_template.render_answers(talk) == RenderedChat("user: hi!assistant:  yo !", (Span(6, 9), Span(20, 25)))
    assert marked_template.render_answers(talk, last=True).answers == (Span(20, 25),)


def test_templates_run_in_a_sandbox_and_say_what_is_wrong(tmp_path):
    def render(text, talk=TALK, **more):
        (tmp_path / "t.jinja").write_text(text)
        config = ChatTemplate.Config(path=str(tmp_path / "t.jinja"), **more)
        return config.build(tokenizer=ByteTokenizer.Config().build()).render_answers(talk)

    with pytest.raises(
        ChatTemplateError, match=r"t\.jinja cannot render it: access to attribute '__class__'"
    ) as caught:
        render("{{ ''.__class__.__mro__ }}")
    copied = pickle.loads(pickle.dumps(caught.value))  # processes that read data send their errors
    assert (str(copied), copied.reason) == (str(caught.value), caught.value.reason)
    assert copied.reason.startswith("access to attribute")
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"t\.jinja: line 1: "):
        render("{% for %}")
    with pytest.raises(
        InputError, match=r"renders messages\[1\] differently when more messages follow[\s\S]*answers to 'last'"
    ):
        render("{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}")
    assert render("{{ strftime_now('%d %b') }}{{ {'<': 1} | tojson }}", today="2025-01-02").text == '02 Jan{"<": 1}'
    words(tmp_path / "bare")
    bare = ChatTemplate.Config(path=str(tmp_path / "bare/tokenizer_config.json"))
    with pytest.raises(InputError, match="has no chat template"):
        bare.build(tokenizer=ByteTokenizer.Config().build())


GOOD = {"messages": [ASK, TALK[1]]}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((), r"is empty \(0 bytes\)"),
        ((" ", ""), "has no rows"),
        ((GOOD, '{"messages": ['), r"chat\.jsonl, line 2: is not JSON: .* at column \d+"),
        ((GOOD, "", "[1]"), r"chat\.jsonl, line 3: is a list"),
        (({"mesages": []},), r"line 1: the field 'messages' is not a list[\s\S]*nearest: mesages"),
        (({"messages": [ASK, {"role": "asistant", "content": "4"}]},), r"messages\[1\] has the role 'asistant'\n"
         r"    did you mean: assistant\?\n    expected: one of system, developer, user, assistant, tool"),
        (({"messages": [{"role": "user"}]},), r"messages\[0\] has no text in 'content'"),
        ((GOOD, {"messages": [ASK]}), "line 2: has no message from the assistant"),
        ((GOOD, {"messages": [ASK, {"role": "assistant", "content": "x" * 99}]}),
         r"line 2: the conversation is longer than a row\n    got: 12\d tokens\n    expected: at most 65, "),
    ],
)  # fmt: skip
def test_bad_data_is_one_error_with_its_place(rows, reason, file, tmp_path):
    with pytest.raises(InputError, match=reason):
        config(file(*rows)).build().train()


def test_what_is_too_long_is_cut_or_left_out(file):
    long = {"messages": [ASK, {"role": "assistant", "content": "x" * 99}]}
    cut = config(file(long), too_long="truncate").build()
    assert {t for row in learnt(cut, first(cut)) for t in row} == {"x" * (65 - len("User:\n2 + 2?\n\nAssistant:\n"))}
    some = config(file(long, GOOD), too_long="drop", packing="none").build()
    assert {t for row in learnt(some, first(some)) for t in row} == {"4$"}


def test_all_conversations_that_are_too_long_are_counted(file):
    def long(size):
        return {"messages": [ASK, {"role": "assistant", "content": "x" * size}]}

    path = file(GOOD, long(99), GOOD, long(300), long(120))
    with pytest.raises(InputError) as raised:
        config(path).build()
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("chat.jsonl, line 2: the conversation is longer than a row")
    longest = 328  # 300 bytes of answer in the plain template
    assert lines[3] == f"    too long: 3 of 5 conversations; the longest has {longest} tokens ({path}, line 4)"
    assert f"raise input.sequence_length to at least {longest - 1}" in lines[4]
    config(path, sequence_length=longest - 1).build()


def test_text_mixed_with_conversations_is_learned_as_a_whole(file, tmp_path):
    (tmp_path / "text.txt").write_text("plain text. " * 3)
    parts = {"chat": ChatFiles.Config(paths=file(GOOD)), "text": Files.Config(paths=str(tmp_path / "text.txt"))}
    source = config(
        "", source=Mixture.Config(sources=parts, weights={"chat": 1.0, "text": 1.0}), packing="none"
    ).build()
    batches = source.train()
    targets = {t for batch in itertools.islice(batches, 6) for row in learnt(source, batch) for t in row}
    batches.close()
    assert targets == {"4$", "plain text. " * 3 + "$"}


def test_text_alone_is_no_conversation(tmp_path):
    (tmp_path / "text.txt").write_text("plain text")
    with pytest.raises(ConfigError, match=r"input.source: does not contain conversations[\s\S]*fix: a run file"):
        config("", source=Files.Config(paths=str(tmp_path / "text.txt"))).build()


def test_equal_conversations_are_held_out_together(file):
    path = file(*[{"messages": [ASK, {"role": "assistant", "content": str(i % 20)}]} for i in range(200)])
    source = ChatFiles.Config(paths=path, validation_fraction=0.3).build()
    sides = [{r[0].text for r in map(source.parts(s)[0].records.__getitem__, range(len(source.parts(s)[0].records)))}
             for s in ("train", "validation")]  # fmt: skip
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 20


def test_the_feature_keeps_the_tokenizer_and_the_shape(file):
    result = ax.resolve("quickstart", with_=[f"chat:data={file(GOOD)},answers=last"]).config
    old = ax.resolve("quickstart").config.input
    assert isinstance(result.input, ChatInput.Config)
    assert (result.input.tokenizer, result.input.batch_size) == (old.tokenizer, old.batch_size)
    assert (result.input.packing, result.input.answers) == ("first-fit", "last")
    with pytest.raises(ConfigError, match="data: Chat needs a value"):
        ax.resolve("quickstart", with_=["chat"]).check()
    with pytest.raises(RequestError, match="finds no text input"):
        ax.resolve(patch(result, {"input": ax.configure(itertools.count)}), with_=["chat:data=x"])
