"""Results of `transformers` for the texts of the matrix, as plain data that can be stored."""

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support.text_matrix.models import TURN_END, make_model

PROMPTS = (
    "The sea is in the",
    "In winter",
    "A river",
    "2 + 2 = ",
    "Once there were",
    "To begin with, the",
    "Rain in",
    "x",
    "(1, 2",
)
"""The matrix uses the prompt after which the model is most certain."""
SPELLED = "<|im_start|>user\nin the sea?<|im_end|>\n<|im_start|>assistant\n"
BEYOND_TEXT = "so<|extra|>"
FIXED_DAY = "2024-07-26"
"""Date of templates in training data."""
MAX_TOKENS = 6

TOOLS = [{"type": "function", "function": {"name": "rain"}}]
_ASK = {"role": "user", "content": "Rain?"}
_DONE = {"role": "assistant", "content": "No."}
_SYSTEM = {"role": "system", "content": "Be kind."}
_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "24 C"}
_TEXT_ARGUMENTS, _ARGUMENTS = '{"town": "Rome", "days": 2}', {"town": "Rome", "days": 2}


def _call(content: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": "rain", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "template": ([_ASK, _DONE], [_ASK, _DONE]),
    "tools": ([_ASK, _DONE], [_ASK, _DONE]),
    "tool call": ([_ASK, _call("Hm.", _TEXT_ARGUMENTS), _DONE], [_ASK, _call("Hm.", _ARGUMENTS), _DONE]),
    "tool result": ([_call("a", _TEXT_ARGUMENTS), _RESULT, _DONE], [_call("a", _ARGUMENTS), _RESULT, _DONE]),
    "null content": (
        [{**_call(None, _TEXT_ARGUMENTS), "refusal": None, "name": None}, {**_RESULT, "tool_calls": None}, _DONE],
        [_call("", _ARGUMENTS), _RESULT, _DONE],
    ),
    "date": ([_SYSTEM, _ASK, _DONE], [_SYSTEM, _ASK, _DONE]),
}
"""Fact -> (messages as clients of the OpenAI API send them, the same messages as chat templates expect them)."""
WITH_TOOLS = ("tools",)


def make_with_reference(family: str, directory: Path) -> dict[str, Any]:
    """Write the model directory of a family and return the values of `transformers` for it.

    If the model allows, one of its end tokens is a token that it writes soon after the prompt.
    """
    prompt, end = PROMPTS[0], None
    draft = make_model(family, directory.with_name(f"{directory.name}-draft"))
    candidates = [(margin, p, token) for p in PROMPTS for margin, token in _ends_after(draft, p)]
    if candidates:
        _, prompt, end = max(candidates)
    make_model(family, directory, written_end=end)
    return {"family": family, "written end": end, **read_reference(directory, prompt)}


def read_reference(directory: Path, prompt: str) -> dict[str, Any]:
    """Return the values of `transformers` for a model directory; needs `transformers` and torch."""
    import transformers

    tokenizer = _tokenizer(directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    generation = transformers.GenerationConfig.from_pretrained(directory)
    bos = tokenizer.bos_token

    def plain(text: str, **options: Any) -> list[int]:
        return tokenizer(text, add_special_tokens=False, **options).input_ids

    return {
        "text": prompt,
        "prompt": tokenizer(prompt).input_ids,
        "plain": plain(prompt),
        "bos token": bos,
        "bos": tokenizer.bos_token_id,
        "prompt with bos": tokenizer(bos + prompt).input_ids,
        "plain with bos": plain(bos + prompt),
        "split with bos": plain(bos + prompt, split_special_tokens=True),
        "special": tokenizer(SPELLED).input_ids,
        "plain special": plain(SPELLED),
        "split special": plain(SPELLED, split_special_tokens=True),
        "beyond": plain(BEYOND_TEXT),
        "rows": config.vocab_size,
        "eos": tokenizer.eos_token_id,
        "end tokens": sorted(_as_list(generation.eos_token_id)),
        "written": _write(directory, prompt),
        "chats": {chat: encode_chat(directory, chat, FIXED_DAY) for chat in CHATS},
        "asked": {chat: encode_chat(directory, chat, FIXED_DAY, asked=True) for chat in CHATS},
        "answers": {chat: _mark_answers(directory, chat) for chat in CHATS},
        "dtype": str(config.dtype).removeprefix("torch."),
        "context length": config.max_position_embeddings,
        "sampling": {name: getattr(generation, name) for name in ("temperature", "top_k", "top_p")},
    }


def tools_of(chat: str) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation."""
    return TOOLS if chat in WITH_TOOLS else None


def encode_chat(directory: Path, chat: str, day: str, *, asked: bool = False) -> list[int]:
    """The ids of a conversation; if `asked`, of what stands before its last answer."""
    messages = CHATS[chat][1]
    options = {"tools": tools_of(chat), "tokenize": True, "return_dict": True}
    with _on(day):
        encoding = _tokenizer(directory).apply_chat_template(
            messages[:-1] if asked else messages, add_generation_prompt=asked, **options
        )
    return list(encoding["input_ids"])


def _mark_answers(directory: Path, chat: str) -> list[int]:
    """For each id of a conversation, 1 if the assistant says it."""
    options = {"tools": tools_of(chat), "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    with _on(FIXED_DAY):
        return list(_tokenizer(directory).apply_chat_template(CHATS[chat][1], **options)["assistant_masks"])


def _ends_after(directory: Path, prompt: str) -> Iterator[tuple[float, int]]:
    """(how far the model's choices up to there are ahead of others, token) of tokens that could end what it writes."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids, written, least = list(_tokenizer(directory)(prompt).input_ids), [], float("inf")
    for _ in range(MAX_TOKENS - 1):
        with torch.no_grad():
            (first, second), tokens = model(torch.tensor([ids])).logits[0, -1].float().topk(2)
        token, least = int(tokens[0]), min(least, float(first - second))
        if token <= TURN_END:
            return
        if len(written) > 1 and token not in written and token < 90:
            yield least, token
        ids, written = [*ids, token], [*written, token]


def _write(directory: Path, prompt: str) -> str:
    import torch
    import transformers

    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(directory), _tokenizer(directory)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": MAX_TOKENS, "pad_token_id": 0}
    written = model.generate(ids, do_sample=False, **options)[0].tolist()[ids.shape[1] :]
    ends = _as_list(model.generation_config.eos_token_id)
    return tokenizer.decode(written[:-1] if written[-1] in ends else written, skip_special_tokens=True)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tokenizer(directory: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


@contextlib.contextmanager
def _on(day: str) -> Iterator[None]:
    """Let the templates of `transformers` see a fixed date."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime.fromisoformat(day)

    with mock.patch("transformers.utils.chat_template_utils.datetime", Fixed):
        yield
