"""Text files of an exported model, which make `transformers` encode, end and sample text as the run does."""

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import tokenizers

from axlearn_plugins_models.huggingface.family import Json
from axlearn_plugins_models.huggingface.text_facts import GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from axlearn_plugins_transformer.text.chat_template import TOOL_TEMPLATE, ChatTemplate
from axlearn_plugins_transformer.text.decoding import HasTokenizerJson
from axlearn_plugins_transformer.text.processor import GREEDY_SAMPLING, SAMPLING, TextProcessor
from axlearn_plugins_transformer.text.protocols import bos_id_of, folder_of

KEPT_FOLDER = "huggingface"
"""Folder in an imported run that contains the model's small files."""
_SIDE = (TOKENIZER_CONFIG, TEMPLATE, TOOL_TEMPLATE, "special_tokens_map.json")


def model_settings(text: TextProcessor, length: int | None) -> Json:
    """Return the keys of `config.json` that describe text.

    Args:
        text: Text processor of the run.
        length: Length of the run's rows, which is the context length of a model that was trained from scratch.
    """
    bos = bos_id_of(text.tokenizer)
    return {
        "eos_token_id": _end_tokens(text),
        **({} if bos is None else {"bos_token_id": bos}),
        "max_position_embeddings": text.context_length or length,
    }


def complete_text_files(text: TextProcessor, config: Mapping[str, Any], contents: MutableMapping[str, bytes]) -> None:
    """Add a run's text files to the files of an export. Files that already describe the run are not changed.

    Args:
        text: Text processor of the run.
        config: Exported `config.json`.
        contents: Name -> content of the files so far, such as those that an import kept.
    """
    if not isinstance(text.tokenizer, HasTokenizerJson):
        return  # its ids do not match any tokenizer.json
    tokenizer: Any = text.tokenizer
    for name in _SIDE:
        if name not in contents and (content := read_sibling(tokenizer, name)) is not None:
            contents[name] = content
    generation = None if GENERATION in contents else read_sibling(tokenizer, GENERATION)
    if generation is not None and _describes(
        _json(generation), text
    ):  # not the file of a model that only shares the tokenizer
        contents[GENERATION] = generation
    if TOKENIZER not in contents:
        contents[TOKENIZER] = _with_bos(tokenizer).encode()
    tokenizer_config = _json(contents.get(TOKENIZER_CONFIG))
    before = json.dumps(tokenizer_config)
    tokenizer_config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    tokenizer_config.setdefault("eos_token", tokenizer.eos_token)
    if tokenizer.bos_token is not None:
        tokenizer_config.setdefault("bos_token", tokenizer.bos_token)
    if text.has_template and not _has_template(text.template, tokenizer_config, contents):
        tokenizer_config.pop("chat_template", None)
        contents.pop(TOOL_TEMPLATE, None)
        contents[TEMPLATE] = text.template.source.encode()
        if text.template.tool_source is not None:
            contents[TOOL_TEMPLATE] = text.template.tool_source.encode()
    if json.dumps(tokenizer_config) != before:
        contents[TOKENIZER_CONFIG] = _dump(tokenizer_config)
    _complete_generation(text, config, contents)


def _complete_generation(text: TextProcessor, config: Mapping[str, Any], contents: MutableMapping[str, bytes]) -> None:
    generation = _json(contents.get(GENERATION))
    named = {i for data in (config, generation) for i in _as_list(data.get("eos_token_id"))}
    changed: Json = {}
    if not text.end_tokens <= named or (generation and "eos_token_id" not in generation):
        changed["eos_token_id"] = _end_tokens(text)
    for name, value in text.sampling.items():
        if value != _read_setting(generation, name):
            changed |= _setting(name, value, text.sampling)
    if not changed:
        return
    if not generation:
        changed = {**model_settings(text, None), **changed}
        changed.pop("max_position_embeddings")
    contents[GENERATION] = _dump({**generation, **changed})


def _describes(generation: Mapping[str, Any], text: TextProcessor) -> bool:
    """Return whether a generation_config.json ends and samples outputs as the run does."""
    names = GREEDY_SAMPLING if generation.get("do_sample") is False else tuple(SAMPLING)
    stated = {name: value for name in names if (value := _read_setting(generation, name)) is not None}
    ends = {i for i in _as_list(generation.get("eos_token_id")) if i is not None}
    return ends <= text.end_tokens and stated == text.sampling


def _read_setting(generation: Mapping[str, Any], name: str) -> Any:
    """Return the value of a sampling setting in a generation_config.json, or None if it is not set."""
    if name == "temperature" and generation.get("do_sample") is False:
        return 0.0
    value = generation.get(name, 1.0 if name == "temperature" and generation.get("do_sample") else None)
    return None if name == "repetition_penalty" and value == 1 else value


def _setting(name: str, value: float, sampling: Mapping[str, float]) -> Json:
    """Return the keys of generation_config.json that set a sampling default, given all defaults."""
    if name == "temperature" and value == 0:
        return {"do_sample": False}
    if name in GREEDY_SAMPLING[1:]:  # applies to greedy outputs too
        return {name: value}
    return {name: value} if sampling.get("temperature") == 0 else {name: value, "do_sample": True}


def _has_template(template: ChatTemplate, tokenizer_config: Json, contents: Mapping[str, bytes]) -> bool:
    if TEMPLATE in contents:
        return contents[TEMPLATE].decode("utf-8", "replace") == template.source
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):
        inline = {t["name"]: t["template"] for t in inline}.get("default")
    return inline == template.source


def _with_bos(tokenizer: Any) -> str:
    """Return a tokenizer.json that prepends the run's BOS token, or no token if the run has none."""
    source = tokenizer.to_json()
    library = tokenizers.Tokenizer.from_str(source)
    library.encode_special_tokens = False
    library.no_padding()
    library.no_truncation()
    ids, plain = library.encode("a").ids, library.encode("a", add_special_tokens=False).ids
    front = ids[:1] if ids[: len(plain)] != plain else []
    expected = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if front == expected:
        return source
    data = json.loads(source)
    processor = data.get("post_processor") or {}
    processors = processor["processors"] if processor.get("type") == "Sequence" else [processor]
    processors = [p for p in processors if p and p["type"] != "TemplateProcessing"]
    data["post_processor"] = {"type": "Sequence", "processors": processors} if processors else None
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    if expected:
        bos = tokenizer.bos_token
        template = tokenizers.processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_id)]
        )
        existing = library.post_processor
        library.post_processor = (
            tokenizers.processors.Sequence([existing, template]) if existing is not None else template
        )
    return library.to_str(pretty=False)


def read_sibling(tokenizer: Any, name: str) -> bytes | None:
    """Read a file from the folder of a run's tokenizer. Return None if it is missing."""
    folder = folder_of(tokenizer)
    paths = [] if folder is None else [os.path.join(folder, name), os.path.join(folder, KEPT_FOLDER, name)]
    return next((Path(p).read_bytes() for p in paths if os.path.isfile(p)), None)


def _end_tokens(text: TextProcessor) -> int | list[int]:
    first = text.tokenizer.eos_id
    other_tokens = [i for i in text.config.end_tokens if i != first]
    return [first, *other_tokens] if other_tokens else first


def _json(content: bytes | None) -> Json:
    data = json.loads(content) if content else {}
    return data if isinstance(data, dict) else {}


def _dump(data: Json) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
