"""Model directories with every fact about text that a route can lose: the weights of fixtures, with new text files."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from support.paths import HF_FIXTURES

ROWS = 96
"""Number of embedding rows of all fixtures."""
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, TURN_END = 1, 2, 4
BEYOND = "<|extra|>"
"""An added token with the id `ROWS`, for which no model has a row."""
MERGES = (("e", "r"), ("i", "n"), ("Ġ", "t"), ("Ċ", "Ċ"))
NO_BOS = ("gpt2", "qwen2", "qwen3", "qwen3-moe")
"""Families whose tokenizers prepend no token, like the published ones."""
SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
VARIANTS = {
    "llama2-linear": ("llama2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
}
"""Name -> (fixture, changes to its config.json)."""
_FIXTURES = (
    "deepseek-v2", "deepseek-v3",
    "gemma2", "gemma3", "gpt2", "llama2", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe",
)  # fmt: skip
FAMILIES = (*_FIXTURES, *VARIANTS)
"""Models with different layers. What is compared here does not depend on the layers, so later fixtures are not added."""

TEMPLATE = """
{%- if bos_token is defined and PREFIX %}{{ bos_token }}{% endif %}
{%- if tools %}<|im_start|>tools{{ '\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'system' %}{{ 'Date: ' + strftime_now('%Y-%m-%d') + '. ' }}{% endif %}
{%- if message.role == 'assistant' %}{% generation %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value | tojson }}{% endfor %}]{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content }}{% if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}<|im_end|>{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_model(family: str, directory: Path, *, written_end: int | None = None) -> Path:
    """Write a model directory.

    Args:
        family: one of `FAMILIES`.
        directory: to write.
        written_end: one more end token, which the model writes soon after `text_matrix_reference.PROMPT`.
    """
    fixture, changes = VARIANTS.get(family, (family, {}))
    shutil.copytree(HF_FIXTURES / fixture, directory, ignore=lambda *_: ["expected.safetensors"])
    bos = fixture not in NO_BOS
    _make_tokenizer(bos).save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS if bos else TURN_END],
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE.replace("PREFIX", "true" if bos else "false"),
        },
    )
    ends = [EOS, TURN_END] + ([] if written_end is None else [written_end])
    _write(
        directory / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": ends, "do_sample": True, **SAMPLING},
    )
    config = json.loads((directory / "config.json").read_text())
    _write(directory / "config.json", {**config, "eos_token_id": EOS if bos else TURN_END, **changes})
    return directory


def _make_tokenizer(bos: bool) -> Tokenizer:
    """Build a tokenizer with single characters and a few pairs, and one more id than the models have rows."""
    merged = ["".join(pair) for pair in MERGES]
    printable = [chr(c) for c in range(32, 127) if chr(c) not in "`^~@%$\\;&*"]
    tokens = [*SPECIAL, "Ċ", "Ġ", *printable[1:], *merged]  # newline and space, as byte-level tokenizers spell them
    assert len(tokens) <= ROWS, len(tokens)
    vocabulary = {token: i for i, token in enumerate([*tokens, *(f"<unused{i}>" for i in range(ROWS - len(tokens)))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(MERGES), unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_special_tokens([tokenizers.AddedToken(BEYOND, special=True)])
    assert tokenizer.token_to_id(BEYOND) == ROWS
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def _write(file: Path, data: dict) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n")
