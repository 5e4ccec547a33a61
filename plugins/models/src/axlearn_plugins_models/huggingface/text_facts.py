"""Read the text settings in the files of a model directory: begin and end tokens, defaults, limits and templates."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import tokenizers

from axlearn_core.errors import CheckpointError, ConfigError, Problem
from axlearn_plugins_models.huggingface.members import member, read_json
from axlearn_plugins_transformer.text.processor import GREEDY_SAMPLING, SAMPLING

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
GENERATION, TOKENIZER_CONFIG, TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"

MODULES = "modules.json"
"""List of the modules of a sentence-transformers model. The pooling module has a folder with a `config.json`."""
_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}


@attrs.frozen
class TextFacts:
    """The text settings that a model's files state.

    Attributes:
        eos: Token that ends a document, or None if no file names one.
        bos: Token that the tokenizer prepends to a text, or None.
        end_tokens: Ids that end an output, from `config.json` and `generation_config.json`.
        sampling: Sampling defaults from `generation_config.json`.
        context_length: Context length in tokens, or None if `config.json` does not state it.
        pooling: Pooling of embeddings from the files of sentence-transformers, or None.
        notes: Contradictions between files, and how they were resolved.
    """

    eos: str | None
    bos: str | None
    end_tokens: tuple[int, ...] = ()
    sampling: Mapping[str, float] = attrs.field(factory=dict)
    context_length: int | None = None
    pooling: str | None = None
    notes: tuple[str, ...] = ()

    def settings(self, tokenizer: Path) -> dict[str, Any]:
        """Return the settings of an experiment for a model with these facts.

        Args:
            tokenizer: Path of its `tokenizer.json`.
        """
        text = {
            "type": "text-processor",
            "end_tokens": list(self.end_tokens),
            "sampling": dict(self.sampling),
            "context_length": self.context_length,
            **({} if self.pooling is None else {"pooling": self.pooling}),
        }
        path = str(tokenizer.absolute())
        return {
            "input.tokenizer": {"type": "tokenizer-json", "path": path, "eos": self.eos, "bos": self.bos},
            "text": text,
        }


def read_text_facts(directory: Path, config: Mapping[str, Any], rows: int) -> TextFacts:
    """Read the text settings of a model directory.

    Args:
        directory: Model directory.
        config: Content of its `config.json`.
        rows: Number of rows in the model's embedding.

    Raises:
        CheckpointError: If a file is missing or damaged.
        ConfigError: If the tokenizer's base vocabulary is larger than the model's.
    """
    tokenizer = _load_tokenizer(directory)
    generation, tokenizer_config = _read(directory, GENERATION), _read(directory, TOKENIZER_CONFIG)
    notes = [
        *_check_vocabulary(directory, tokenizer, rows),
        *_contradictions(directory, config, generation, tokenizer_config),
    ]
    named, vocab = _content(tokenizer_config.get("eos_token")), tokenizer.get_vocab(with_added_tokens=True)
    eos = _end_token(named, (config, generation), tokenizer)
    ends = list(dict.fromkeys(i for data in (config, generation) for i in _ids(data.get("eos_token_id")) if i < rows))
    if named in vocab and ends and vocab[named] not in ends:
        notes.append(
            f"{TOKENIZER_CONFIG} ends a text with {named!r} (id {vocab[named]}), but {CONFIG} and {GENERATION} with the ids "
            f"{', '.join(map(str, ends))}; using these"
        )
    added = tokenizer_config.get("added_tokens_decoder")
    named_tokens = map(_content, added.values()) if isinstance(added, Mapping) else ()
    if missing_tokens := [token for token in named_tokens if token is not None and token not in vocab]:
        names = ", ".join(map(repr, missing_tokens[:8]))
        notes.append(
            f"{TOKENIZER_CONFIG} adds the tokens {names}, but {TOKENIZER} does not have them; they are encoded as text"
        )
    bos = _first_token(tokenizer)
    begins = next(_ids(config.get("bos_token_id")), None)
    if bos is not None and begins is not None and begins != vocab[bos]:
        notes.append(
            f"{CONFIG} begins a text with the id {begins}, but {TOKENIZER} with {bos!r} (id {vocab[bos]}); using the latter"
        )
    sampling, unsupported = _sampling(generation)
    if unsupported:
        notes.append(f"{GENERATION}: ignored unsupported sampling settings: {', '.join(unsupported)}")
    pooling, unsupported_pooling = _pooling(directory)
    if unsupported_pooling is not None:
        notes.append(f"{MODULES}: ignored unsupported pooling: {unsupported_pooling}; set serving.runner.pooling")
    return TextFacts(eos, bos, tuple(ends), sampling, context_length(config), pooling, tuple(notes))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return a model's context length in tokens, from its `config.json`, or None if the file does not state it.

    RoPE scaling relative to an original length extends the context by the scaling factor. `max_position_embeddings`
    already includes this factor for the types `llama3` and `longrope`, and in files that state the longer length.
    """
    length = next((config[k] for k in ("max_position_embeddings", "n_positions") if type(config.get(k)) is int), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if length is None or length < 1 or not isinstance(scaling, Mapping):
        return length if length and length > 0 else None
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float):
        return length
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        return max(length, int(original * factor))
    return int(length * factor)


def _load_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    file = directory / TOKENIZER
    if not file.is_file():
        raise CheckpointError(
            f"{directory} has no {TOKENIZER}\n"
            "    fix: write one with transformers: `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
        )
    member(directory, TOKENIZER)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file} is not a valid tokenizer.json: {error}") from None
    tokenizer.no_padding()  # padding tokens would hide the token that begins a text
    tokenizer.no_truncation()
    return tokenizer


def _check_vocabulary(directory: Path, tokenizer: tokenizers.Tokenizer, rows: int) -> Iterator[str]:
    """Yield a note that lists the added tokens for which the model has no rows; see `tokenizers.tokens_beyond`."""
    added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
    beyond = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items() if i >= rows}
    if not beyond:
        return
    if beyond.keys() - added.keys():
        raise ConfigError(
            Problem(
                path=f"{CONFIG}: vocab_size",
                message=f"the tokenizer {directory / TOKENIZER} has more tokens than the model",
                got=str(rows),
                expected=f"at least {max(beyond) + 1}",
                fix="use the tokenizer that belongs to the weights",
            )
        )
    names = ", ".join(f"{added[i]!r} ({i})" for i in sorted(beyond)[:8])
    more = f", and {len(beyond) - 8} more" if len(beyond) > 8 else ""
    yield f"the model has {rows} rows and none for the added tokens {names}{more}; texts with these tokens are refused"


def _contradictions(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> Iterator[str]:
    dtypes = [str(config[k]).removeprefix("torch.") for k in ("dtype", "torch_dtype") if config.get(k) is not None]
    if len(set(dtypes)) > 1:
        yield f"{CONFIG} has dtype {dtypes[0]} and torch_dtype {dtypes[1]}; using {dtypes[0]}"
    inline = tokenizer_config.get("chat_template")
    separate = member(directory, TEMPLATE).read_text("utf-8", "replace") if (directory / TEMPLATE).exists() else None
    if isinstance(inline, str) and separate is not None and separate.strip() != inline.strip():
        yield f"{TEMPLATE} and {TOKENIZER_CONFIG} have different chat templates; using {TEMPLATE}"


def _sampling(generation: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return (sampling defaults, unsupported settings)."""
    values = {n: v for n in SAMPLING if isinstance(v := generation.get(n), int | float) and not isinstance(v, bool)}
    sampling = {n: float(v) for n, v in values.items() if SAMPLING[n][0] <= v <= SAMPLING[n][1]}
    if generation.get("do_sample") is False:
        sampling = {"temperature": 0.0, **{n: v for n, v in sampling.items() if n in GREEDY_SAMPLING[1:]}}
    elif generation.get("do_sample") is True:
        sampling.setdefault("temperature", 1.0)
    penalty = generation.get("repetition_penalty")
    unsupported = [] if penalty is None or "repetition_penalty" in sampling else [f"repetition_penalty {penalty}"]
    if sampling.get("repetition_penalty") == 1:  # the files of many models state that there is no penalty
        del sampling["repetition_penalty"]
    return sampling, unsupported


def _pooling(directory: Path) -> tuple[str | None, str | None]:
    """Return (pooling, unsupported pooling) from the files of sentence-transformers, or (None, None) if the files are missing."""
    modules = read_json(directory, MODULES) if (directory / MODULES).exists() else []
    entries = [entry for entry in modules if isinstance(entry, Mapping)] if isinstance(modules, list) else []
    entry = next((entry for entry in entries if str(entry.get("type")).rpartition(".")[2] == "Pooling"), None)
    if entry is None:
        return None, None
    name = str(entry.get("path"))
    folder = directory / name
    if Path(name).name != name or not (folder / CONFIG).exists():
        return None, f"the folder {name!r} has no {CONFIG}"
    modes = [key.removeprefix("pooling_mode_") for key, value in _read(folder, CONFIG).items() if value is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) == 1 and modes[0] in _POOLINGS:
        return _POOLINGS[modes[0]], None
    return None, " and ".join(modes) or "none"


def _end_token(
    named: str | None, configs: tuple[Mapping[str, Any], ...], tokenizer: tokenizers.Tokenizer
) -> str | None:
    """Return the token that ends a document, or None if no file names one that the tokenizer has.

    `config.json` and `generation_config.json` name ids. If they name several, such as the end of a turn and the end of a
    text, `tokenizer_config.json` decides which one ends a document. Without it, the first one does.
    """
    for data in configs:
        ends = [token for i in _ids(data.get("eos_token_id")) if (token := tokenizer.id_to_token(i)) is not None]
        if ends:
            return named if named in ends else ends[0]
    return named if named in tokenizer.get_vocab(with_added_tokens=True) else None


def _first_token(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return the token that a tokenizer's post-processor prepends to a text, or None."""
    front, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    if not plain or front[: len(plain)] == plain or front[0] == plain[0]:
        return None
    return tokenizer.id_to_token(front[0])


def _read(directory: Path, name: str) -> Mapping[str, Any]:
    """Return the content of a JSON object file, or an empty mapping if it is missing or not an object."""
    data = read_json(directory, name) if (directory / name).exists() else {}
    return data if isinstance(data, Mapping) else {}


def _ids(value: Any) -> Iterator[int]:
    """Yield the ids in a value, which may be a single id or a list. Other values are ignored."""
    for one in value if isinstance(value, list) else [value]:
        if type(one) is int and 0 <= one < 1 << 31:
            yield one


def _content(value: Any) -> str | None:
    """Return the text of a token, which may be stored together with its options."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
