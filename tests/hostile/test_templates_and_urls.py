"""Chat templates of strangers, and URLs that reach further than data."""

import pickle

import pytest

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError, RequestError
from axlearn_plugins_transformer.text import template_process
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.data_files import list_files
from axlearn_plugins_transformer.text.sources import Files
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
ATTACKS = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * 10**10 }}",
    "doubling": "{% set n = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "a wide format": "{{ '%1000000000d' % 1 }}{{ '{:9999999999d}'.format(1) }}",
    "a wide column": "{{ 'x'|center(10**10) }}",
    "a power": "{{ 9**(9**9) }}",
    "long output": "{% for a in range(99999) %}{% for b in range(9) %}" + "x" * 2000 + "{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "builtins": "{{ self.__init__.__globals__.__builtins__ }}",
    "attr": "{{ ('x'|attr('format')).__globals__.os }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "a change of what it is given": "{{ messages.append(1) }}",
    "not a template": "{% for %}",
    "deep": "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "zero": "{{ 1 // 0 }}",
}


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 2.0)
    monkeypatch.setattr(template_process, "START_SECONDS", 10.0)

    def make(text):
        file = tmp_path / "chat_template.jinja"
        file.write_text(text)
        return ChatTemplate.Config(path=str(file)).build(tokenizer=ByteTokenizer.Config().build())

    return make


@pytest.mark.fast_cases("a change of what it is given", "a long text", "globals", "include")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_is_one_error(name, template):
    instance = template(ATTACKS[name])
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        instance.render(MESSAGES)


@pytest.mark.slow
def test_the_next_conversation_is_rendered(template):
    slow = "{% if messages|length > 1 %}" + ATTACKS["endless loops"] + "{% endif %}{{ messages[0].content }}"
    instance = template(slow)
    assert instance.render(MESSAGES).text == "hello"
    with pytest.raises(InputError, match="took longer than 2 s"):
        instance.render(MESSAGES * 2)
    assert instance.render(MESSAGES).text == "hello"
    assert pickle.loads(pickle.dumps(instance)).render(MESSAGES).text == "hello"


URLS = (
    "simplecache::https://example.com/x.txt",
    "zip://x.txt::file:///etc/x.zip",
    "reference://x.json",
    "ssh://host/x",
    "sftp://host/x",
    "github://org:repo@main/x",
    "git:///x",
    "dask://x",
    "jupyter://x",
    "hf://datasets/x",
    "data://text/plain;base64,aGk=",
    "local:///etc/passwd",
    "FILE:///etc/passwd",
)


@pytest.mark.parametrize("url", URLS)
def test_other_protocols_are_refused_by_the_config_and_by_the_reader(url):
    with pytest.raises(ConfigError, match=r"paths: (has the protocol|chains fsspec file systems)"):
        check(Files.Config(paths=url))
    with pytest.raises(RequestError, match=r"has the protocol|chains fsspec file systems"):
        list_files((url,))


@pytest.mark.parametrize(
    "url", ["https://example.com/x.txt", "s3://bucket/x", "gs://bucket/x", "az://b/x", "memory://x"]
)
def test_the_protocols_of_data_are_let_through(url):
    check(Files.Config(paths=url))
