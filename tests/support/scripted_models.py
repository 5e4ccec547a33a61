"""Chat templates and scripted outputs of models that call tools and reason."""

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


def hermes_template(folder):
    """Write the template to a folder and build it."""
    path = folder / "hermes.jinja"
    path.write_text(HERMES)
    return ChatTemplate.Config(path=str(path)).build(tokenizer=ByteTokenizer.Config().build())


def prompt_of(request):
    """Return the text of a request's prompt."""
    return bytes(token for token in request.prompt if token < 256).decode()
