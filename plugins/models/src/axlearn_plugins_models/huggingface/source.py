"""Open a model directory in Hugging Face format. Checks everything without reading any weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.compose import Functional
from axlearn_core.contracts.experiment import sequence_length, set_experiment_name
from axlearn_core.errors import CheckpointError, ConfigError, Problem, counted
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_plugins_models.huggingface import files, stream
from axlearn_plugins_models.huggingface.depth_tensors import depth_of
from axlearn_plugins_models.huggingface.family import Family, Json, Settings, families, family
from axlearn_plugins_models.huggingface.files import StoredTensor
from axlearn_plugins_models.huggingface.hub import locate_model
from axlearn_plugins_models.huggingface.members import read_json
from axlearn_plugins_models.huggingface.quantized_tensors import KEY, QuantizedTensor
from axlearn_plugins_models.huggingface.table import Tensor
from axlearn_plugins_models.huggingface.text_facts import CONFIG, TOKENIZER, read_text_facts
from axlearn_plugins_models.huggingface.unknown import unknown_type
from axlearn_plugins_models.huggingface.unread_keys import check_unread

MAX_SIZE = 1 << 24
"""Maximum value of a size in a config.json, such as a vocabulary size or a width."""
_NO_SIZES = ("token_id", "theta", "position", "window", "_ctx", "length")
COMPUTE = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@attrs.frozen(eq=False)
class Source:
    """An opened model directory.

    Attributes:
        directory: Path of the directory.
        data: Content of `config.json`.
        family: Family of the model.
        resolved: Experiment of the model.
        model: Abstract model of the experiment.
        tensors: Name -> tensor that the model needs.
        stored: Name -> tensor in the files, with the names of `tensors`.
        origin: Path that was opened, or `org/name@commit` if the model was downloaded from the hub.
        notes: Messages for the user.
        duplicates: Name -> tensor that duplicates another one, and that an export writes again.
    """

    directory: Path
    data: Json
    family: Family
    resolved: Resolved
    model: Functional
    tensors: dict[str, Tensor]
    stored: dict[str, StoredTensor]
    origin: str
    notes: tuple[str, ...] = ()
    duplicates: Mapping[str, StoredTensor] = {}

    @property
    def config(self) -> Any:
        """Config of the trainer."""
        return self.resolved.config

    def read(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Read the parameters in `like`, in its dtypes and shardings; see `stream.read`."""
        return stream.read(self.tensors, self.stored, like)


def is_model(directory: Path) -> bool:
    """Return whether a directory may contain a model in this format: its `config.json` has a `model_type`."""
    return (directory / CONFIG).is_file() and "model_type" in _json(directory)


def open_model(
    uri: str | Path,
    *,
    with_: Iterable[str] = (),
    set: Iterable[str] = (),  # named like the command-line option
    stored_dtype: bool = False,
) -> Source:
    """Open a model directory, or download a model from the hub and open it.

    Args:
        uri: Directory with `config.json`, safetensors in any number of shards, and `tokenizer.json`; or a name on the hub,
            `org/name` or `org/name@revision`.
        with_: Features to add to the experiment.
        set: Settings for the experiment.
        stored_dtype: Whether parameters keep the dtype of the files, for inference. For training they are float32.

    Raises:
        RequestError: If the directory is not valid, or the model cannot be downloaded; only the headers were read.
    """
    place = locate_model(uri)
    directory = place.path
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}\n    fix: use the directory of a Hugging Face model")
    data = _json(directory)
    if data.get("model_type") not in families():  # it may also have an unhashable type
        raise unknown_type(directory, data)
    model_family = family(data["model_type"])
    dtype = COMPUTE.get(str(data.get("dtype") or data.get("torch_dtype")), "float32")
    settings: Json = {"model.dtype": dtype}
    text = read_text_facts(directory, data, _vocabulary(Settings(data))) if model_family.text else None
    if text is not None:
        settings |= text.settings(directory / TOKENIZER)
    if stored_dtype:
        settings["model.param_dtype"] = dtype
    all_tensors = files.stored_tensors(directory)
    _check_sizes(directory, data, len(all_tensors))
    base, unread = _resolve(model_family, directory, data, settings)
    check_unread(data, unread, model_family.model_type)
    length = data.get("max_position_embeddings") or data.get("n_positions")
    length = length if type(length) is int else None
    trainer: Any = base.config
    if length and (sequence_length(trainer) or 0) > length:
        base, unread = _resolve(model_family, directory, data, {**settings, "input.sequence_length": length})
    resolved = resolve(set_experiment_name(base.config, model_family.model_type), with_=with_, set=set)
    config: Any = resolved.config
    model_config, model = config.model, Functional.from_config(config.model)
    ignored = model_family.ignored_names(data, all_tensors, depth_of(model_config))
    tensors = model_family.layout(model, data)
    stored = model_family.dequantize(data, {n: t for n, t in all_tensors.items() if n not in ignored})
    if model_family.prefix and not any(n.startswith(model_family.prefix) for n in stored):
        bare = {n.removeprefix(model_family.prefix): t for n, t in tensors.items()}
        tensors = {n: attrs.evolve(t, name=n) for n, t in bare.items()}
    converted = [n for n, tensor in stored.items() if isinstance(tensor, QuantizedTensor)]
    files.check_readable(tensor for n, tensor in stored.items() if n not in {*converted})
    depth_copies = model_family.depth_copies(model_config, data)
    possible = {**model_family.copies, **depth_copies}
    copies = {n: t for n, t in possible.items() if n in stored and t in stored and n not in tensors}
    files.check_tensors(stored, tensors, copies, directory)
    _check_copies(directory, stored, copies, depth_copies)
    notes = [f"these keys of config.json were not read: {', '.join(unread)}"] if unread else []
    notes += text.notes if text is not None else ()
    if text is not None and text.eos is None:
        notes += ["no file names the token that ends a text; using the usual one of the vocabulary, if it has one"]
    if converted:
        method = data[KEY]["quant_method"]
        notes += [f"{counted(len(converted), 'weight')} of the quantization {method} were converted to floating point"]
    notes += [f"ignored, since they are not part of the model: {', '.join(sorted(ignored)[:8])}"] if ignored else []
    model_tensors = {n: stored[n] for n in tensors}
    duplicates = {n: stored[n] for n in copies if n in depth_copies}
    return Source(
        directory, data, model_family, resolved, model, tensors, model_tensors, place.origin, tuple(notes), duplicates
    )


def _check_copies(
    directory: Path, stored: Mapping[str, Any], copies: Mapping[str, str], depth_copies: Mapping[str, str]
) -> None:
    """Raise `CheckpointError` if tensors that share their values in the model differ in the files."""
    differing = [name for name, other in copies.items() if not stream.same(stored[name], stored[other])]
    if not differing:
        return
    fix = "set tie_word_embeddings to false"
    if depth_copies.keys() & {*differing}:
        fix = "import the model without multi-token-prediction, whose heads share the embedding and the output layer"
    problems = [f"{name} differs from {copies[name]}" for name in differing]
    raise files.problem_list(f"{directory}: tied tensors differ", problems, fix)


def _json(directory: Path) -> Json:
    data = read_json(directory, CONFIG)
    if not isinstance(data, dict):
        raise CheckpointError(f"{directory / CONFIG} is not a JSON object")
    return data


def _check_sizes(directory: Path, data: Json, count: int) -> None:
    """Raise an error if a size is impossible, before anything of that size is built. `count` is the number of stored tensors."""
    problems = []
    for key, value in data.items():
        if type(value) is not int or any(part in key for part in _NO_SIZES):
            continue
        limit = count if "layers" in key or key == "n_layer" else MAX_SIZE
        if not -1 <= value <= limit:
            files_have = f": the files have {count} tensors" if limit == count else ""
            problems.append(
                Problem(
                    path=f"config.json: {key}",
                    message="is too large or negative for a size of this model",
                    got=str(value)[:40],
                    expected=f"at most {limit:,}{files_have}",
                    fix="use the config.json and the weights from the same model",
                )
            )
    if problems:
        raise ConfigError(problems)


def _resolve(model_family: Family, directory: Path, data: Json, settings: Json) -> tuple[Resolved, list[str]]:
    try:
        return model_family.resolve(data, **settings)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:  # families compute with the values
        raise CheckpointError(
            f"{directory / CONFIG} cannot be read as {data['model_type']}: {type(error).__name__}: {error}\n"
            "    fix: use the config.json that belongs to the weights"
        ) from error


def _vocabulary(hf: Settings) -> int:
    """Return the number of rows in the model's embedding. Raise `ConfigError` if `config.json` does not state it."""
    if type(hf.need("vocab_size")) is not int:
        raise ConfigError(
            Problem(
                path="config.json: vocab_size", message="wrong type", got=repr(hf["vocab_size"])[:80], expected="int"
            )
        )
    return hf["vocab_size"]
