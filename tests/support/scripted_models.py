"""Chat templates and scripted outputs of models that call tools and reason."""

import json

from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer

HERMES = (
    "{% if tools %}Tools: {{ tools | tojson }}\n<tool_call>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template in the style of Qwen 3."""
HERMES_WITH_ENDS = HERMES.replace(
    "{% endfor %}\n", "{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
)
"""The template with an end token after each answer."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def hermes_template(folder, source=HERMES):
    """Write the template to a folder and build it."""
    path = folder / "hermes.jinja"
    path.write_text(source)
    return ChatTemplate.Config(path=str(path)).build(tokenizer=ByteTokenizer.Config().build())


def prompt_of(request):
    """Return the text of a request's prompt."""
    return bytes(token for token in request.prompt if token < 256).decode()


class WeatherScript:
    """Outputs of a model that reasons, calls the offered tools once, and then answers. A script for `FakeEngine`.

    If the request has a constraint, the output is the first of the possible ones that the constraint allows.
    """

    reasoning = "<think>\nHm.\n</think>"
    answer = "It is sunny."
    arguments = '{"city": "Rome", "days": 3}'

    def __init__(self):
        self._outputs = {}

    def __call__(self, request):
        if request.id not in self._outputs:
            outputs = [list(text.encode()) for text in self._possible(prompt_of(request))]
            self._outputs[request.id] = next(output for output in outputs if _allows(request.constraint, output))
        return self._outputs[request.id]

    def _possible(self, prompt):
        """Yield the outputs after a prompt: calls, text, calls that the request requires, and JSON."""
        offers = prompt.startswith("Tools: ")
        names = [tool["function"]["name"] for tool in json.loads(prompt.splitlines()[0][7:])] if offers else []
        for name in names:
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {self.arguments}}}\n</tool_call>'
            if "<|tool|>" not in prompt:
                yield f"{self.reasoning}\n\nOne moment.{call}"
                yield f"{self.reasoning}{call}"
        yield f"{self.reasoning}\n\n{self.answer}"
        for name in names:
            yield f'[{{"name":"{name}","arguments":{self.arguments}}}]'
        yield f"{self.reasoning}{self.arguments}"
        yield self.arguments


def _allows(constraint, tokens):
    """Return whether a constraint, or None, allows these tokens."""
    if constraint is None:
        return True
    state = constraint.copy()
    for token in tokens:
        if not state.mask()[token // 32] >> (token % 32) & 1:
            return False
        state.accept(token)
    return True
