"""A model directory in Hugging Face format, opened: everything about it is checked, and no weight has been read."""

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.compose import Functional
from axlearn_core.contracts.experiment import sequence_length
from axlearn_core.errors import CheckpointError, ConfigError, Problem
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_plugins_models.huggingface import files, stream
from axlearn_plugins_models.huggingface.family import Family, Json, Settings, families, family
from axlearn_plugins_models.huggingface.files import Stored
from axlearn_plugins_models.huggingface.members import read_json
from axlearn_plugins_models.huggingface.table import Tensor, layout
from axlearn_plugins_models.huggingface.text_facts import CONFIG, TOKENIZER, read_text_facts
from axlearn_plugins_models.huggingface.unknown import unknown_type

LARGEST = 1 << 24
"""The largest size in a config.json: of a vocabulary, a width."""
_NO_SIZES = ("token_id", "theta", "position", "window", "_ctx", "length")
COMPUTE = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@attrs.frozen(eq=False)
class Source:
    """A model directory.

    Attributes:
        data: its `config.json`.
        resolved: the experiment that it stands for.
        model: the model of that, abstract.
        tensors: what the model needs, by name.
        stored: what the files have, by name; the names are those of `tensors`.
        notes: what a user should know.
    """

    directory: Path
    data: Json
    family: Family
    resolved: Resolved
    model: Functional
    tensors: dict[str, Tensor]
    stored: dict[str, Stored]
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """The config of the trainer."""
        return self.resolved.config

    def read(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters in `like`, in its dtypes and shardings; see `stream.read`."""
        return stream.read(self.tensors, self.stored, like)


def is_model(directory: Path) -> bool:
    """Whether a directory may hold a model in this format: its `config.json` says what it is."""
    return (directory / CONFIG).is_file() and "model_type" in _json(directory)


def open_model(
    directory: Path,
    *,
    with_: Iterable[str] = (),
    set: Iterable[str] = (),  # what it is called on the command line
    stored_dtype: bool = False,
) -> Source:
    """Opens a model directory.

    Args:
        directory: with `config.json`, safetensors in any number of shards, and `tokenizer.json`.
        with_: features to add to the experiment.
        set: settings to make in it.
        stored_dtype: keeps parameters in the dtype of the files, for use; for training they are float32.

    Raises:
        RequestError: something is wrong with it; nothing was read but the headers.
    """
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}\n    fix: give the directory of a Hugging Face model")
    data = _json(directory)
    if data.get("model_type") not in families():  # also of a type that no mapping has as a key
        raise unknown_type(directory, data)
    model_family = family(data["model_type"])
    dtype = COMPUTE.get(str(data.get("dtype") or data.get("torch_dtype")), "float32")
    more: Json = {"model.dtype": dtype}
    text = read_text_facts(directory, data, _vocabulary(Settings(data))) if model_family.text else None
    if text is not None:
        more |= text.settings(directory / TOKENIZER)
    if stored_dtype:
        more["model.param_dtype"] = dtype
    all_tensors = files.stored_tensors(directory)
    _check_sizes(directory, data, len(all_tensors))
    base, unread = _resolve(model_family, directory, data, more)
    length = data.get("max_position_embeddings") or data.get("n_positions")
    length = length if type(length) is int else None
    trainer: Any = base.config
    if length and (sequence_length(trainer) or 0) > length:
        base, unread = _resolve(model_family, directory, data, {**more, "input.sequence_length": length})
    resolved = resolve(attrs.evolve(Request.of(base.config, with_=with_, set=set), title=model_family.model_type))
    model = Functional.of(resolved.config.model)  # type: ignore[attr-defined]
    tensors, stored = layout(model, model_family.table(model)), all_tensors
    if model_family.prefix and not any(n.startswith(model_family.prefix) for n in stored):
        bare = {n.removeprefix(model_family.prefix): t for n, t in tensors.items()}
        tensors = {n: attrs.evolve(t, name=n) for n, t in bare.items()}
    ignored = {n for n in stored if any(fnmatch.fnmatchcase(n, p) for p in model_family.ignored)}
    files.check_readable(tensor for n, tensor in stored.items() if n not in ignored)
    copies = {n: of for n, of in model_family.copies.items() if n in stored and of in stored and n not in tensors}
    files.check(stored, {n: t.shape for n, t in tensors.items()}, {*ignored, *copies}, directory)
    differing = [f"{n} is not {of}" for n, of in copies.items() if not stream.same(stored[n], stored[of])]
    if differing:
        raise files.listed(
            f"{directory}: tensors that the config ties differ", differing, "set tie_word_embeddings to false"
        )
    notes = [f"config.json has keys that nothing looked at: {', '.join(unread)}"] if unread else []
    notes += text.notes if text is not None else ()
    if text is not None and text.eos is None:
        notes += [
            "no file names the token that ends a text: the usual one of the vocabulary is taken, where it has one"
        ]
    notes += [f"not part of the model, left out: {', '.join(sorted(ignored)[:8])}"] if ignored else []
    own_tensors = {n: stored[n] for n in tensors}
    return Source(directory, data, model_family, resolved, model, tensors, own_tensors, tuple(notes))


def _json(directory: Path) -> Json:
    data = read_json(directory, CONFIG)
    if not isinstance(data, dict):
        raise CheckpointError(f"{directory / CONFIG} is not a JSON object")
    return data


def _check_sizes(directory: Path, data: Json, count: int) -> None:
    """Refuses sizes that no model has, before anything of that size is built. `count`: of the tensors in the files."""
    problems = []
    for key, value in data.items():
        if type(value) is not int or any(part in key for part in _NO_SIZES):
            continue
        most = count if "layers" in key or key == "n_layer" else LARGEST
        if not -1 <= value <= most:
            files_have = f": the files have {count} tensors" if most == count else ""
            problems.append(
                Problem(
                    path=f"config.json: {key}",
                    message="is a size that this model cannot have",
                    got=str(value)[:40],
                    expected=f"at most {most:,}{files_have}",
                    fix="take config.json and weights of the same model",
                )
            )
    if problems:
        raise ConfigError(problems)


def _resolve(model_family: Family, directory: Path, data: Json, more: Json) -> tuple[Resolved, list[str]]:
    try:
        return model_family.resolve(data, **more)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:  # families compute with values
        raise CheckpointError(
            f"{directory / CONFIG} cannot be read as {data['model_type']}: {type(error).__name__}: {error}\n"
            "    fix: take the config.json that belongs to the weights"
        ) from error


def _vocabulary(hf: Settings) -> int:
    """The rows of the model's table of tokens; raises `ConfigError` if `config.json` does not say."""
    if type(hf.need("vocab_size")) is not int:
        raise ConfigError(
            Problem(
                path="config.json: vocab_size", message="wrong type", got=repr(hf["vocab_size"])[:80], expected="int"
            )
        )
    return hf["vocab_size"]
