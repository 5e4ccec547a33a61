"""Text that a model's own `generate` continues, without the serving engine."""

from types import SimpleNamespace

import pytest

from axlearn_plugins_transformer.text import ByteTokenizer, text_stream
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.text_stream import stream_text


class Model:
    """A model that repeats one letter, and records the options of the last call."""

    def generate(self, prompt, **options):
        self.options = options
        return iter([97] * options["max_tokens"])


@pytest.mark.parametrize(
    ("sampling", "note"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 1.0, "repetition_penalty": 1.0}, ""),
        ({"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}, "top_p 0.9, repetition_penalty 1.1"),
    ],
)
def test_defaults_that_generate_lacks_are_reported(monkeypatch, capsys, sampling, note):
    text = TextProcessor.Config(sampling=sampling).build(tokenizer=ByteTokenizer.Config().build())
    monkeypatch.setattr(text_stream, "text_processor", lambda config, tokenizer: text)
    model = Model()
    loaded = SimpleNamespace(model=model, tokenizer=text.tokenizer, config=None, program=None)
    assert "".join(stream_text(loaded, "x", max_tokens=3)) == "aaa"
    assert model.options.keys() & {"top_p", "repetition_penalty"} == set()
    assert model.options["temperature"] == 0.5
    message = capsys.readouterr().err
    assert message.strip() == (
        note and f"note: without the serving engine, the model's sampling defaults are not applied: {note}"
    )
