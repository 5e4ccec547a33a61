"""Import Hugging Face models into run directories, and export runs in Hugging Face format."""

import contextlib
import functools
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.checkpoint import LocalStorage, open_storage
from axlearn_core.compose import Functional, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.contracts.experiment import checkpoint_uri, sequence_length
from axlearn_core.errors import RequestError
from axlearn_core.run import Run, derive_run
from axlearn_core.run.derive import create_directory, local_target, new_directory
from axlearn_core.run.notices import log_message
from axlearn_core.train.api import provenance
from axlearn_plugins_models.huggingface import files, stream
from axlearn_plugins_models.huggingface.export_text import (
    KEPT_FOLDER,
    complete_text_files,
    model_settings,
    read_sibling,
)
from axlearn_plugins_models.huggingface.family import Family, Json, families, family, find_family
from axlearn_plugins_models.huggingface.members import INDEX, SIDE_FILES, TEMPLATES, member
from axlearn_plugins_models.huggingface.quantized_tensors import KEY as QUANTIZATION
from axlearn_plugins_models.huggingface.source import Source, open_model
from axlearn_plugins_models.huggingface.table import Tensor
from axlearn_plugins_models.huggingface.text_facts import CONFIG, context_length
from axlearn_plugins_models.huggingface.weights import DirectoryWeights
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor

TENSORS = "tensors.json"


def import_run(directory: str | Path, run_dir: Path, *, with_: Iterable[str] = (), set: Iterable[str] = ()) -> Source:
    """Write a run at step 0 with the weights of a model directory. The run directory is created atomically.

    The run contains only weights. Training that starts from it begins with a new optimizer state.

    Args:
        directory: Model in Hugging Face format: a directory, or a name on the hub; see `open_model`.
        run_dir: New run directory.
        with_: Features to add to the experiment, as on the command line.
        set: Settings for the experiment.

    Raises:
        RequestError: If the directory is not a valid model, or if `run_dir` exists; nothing was written.
        WorkError: If the run cannot be written.
    """
    new_directory(run_dir)
    configure_devices(None)
    source = open_model(directory, with_=with_, set=set)
    config = source.config
    if (uri := checkpoint_uri(config)) is not None:
        raise RequestError(
            f"checkpointer.uri: an import stores its checkpoint in RUN_DIR\n    got: {uri}\n"
            "    fix: import without it; then start a separate run, which stores its checkpoints there, from these weights:\n"
            "    --set 'loop={type: start-from-run, run_dir: RUN_DIR}'"
        )

    def read(weights: DirectoryWeights) -> Mapping[str, Any]:
        state = compose(config).state
        places = {path: spec.sharding for path, spec in {**state.params, **state.variables}.items()}
        tensors = weights.read("**", places)
        _report_source(source)
        return tensors

    lock = {"imported_from": source.origin, "provenance": provenance(source.resolved)}
    derive_run(
        DirectoryWeights(source),
        run_dir,
        config,
        read,
        new_step=0,
        lock=lock,
        add_files=functools.partial(_keep_files, source),
    )
    return source


def _keep_files(source: Source, run_dir: Path) -> None:
    """Copy the data that only an export needs: the small files, and the dtype and file of each tensor."""
    folder = run_dir / KEPT_FOLDER
    folder.mkdir()
    for file in {f for pattern in SIDE_FILES for f in source.directory.glob(pattern)}:
        if file.name != INDEX:
            shutil.copyfile(member(source.directory, file.name), folder / file.name)
    for file in source.directory.glob(f"{TEMPLATES}/*.jinja"):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(member(source.directory / TEMPLATES, file.name), folder / TEMPLATES / file.name)
    stored = {n: [s.dtype, s.file.name] for n, s in {**source.stored, **source.duplicates}.items()}
    (folder / TENSORS).write_text(json.dumps(stored) + "\n", "utf-8")


def export_run(
    run_dir: str | Path, directory: str | Path, *, step: int | None = None, dtype: str | None = None
) -> None:
    """Write the model of a run in Hugging Face format. The directory is created atomically.

    Args:
        run_dir: Run directory or URI.
        directory: New directory.
        step: Step of the checkpoint; the default is the newest.
        dtype: Dtype of the parameters. The default is the dtype of the imported files, or else the parameters' own. Other
            variables keep their dtype.

    Raises:
        RequestError: If `run_dir` is not a run, no family describes its model, or `directory` exists.
        WorkError: If the directory cannot be written.
    """
    directory = local_target(directory)
    if directory.exists():
        raise RequestError(f"{directory} already exists; nothing was written\n    fix: use another DIR")
    configure_devices(None)
    source = Run(run_dir).weights(step)
    config: Any = source.experiment
    run_files = _kept_files(run_dir)
    text = text_processor(config)
    model_family, data = _describe_run(run_files, config, text)
    model = Functional.from_config(config.model)
    tensors = model_family.layout(model, data)
    dtypes: dict[str, list[str]] = json.loads(run_files.pop(TENSORS, b"{}"))
    copies = model_family.depth_copies(config.model, data)
    written = {n: t for n, t in copies.items() if t in tensors and (n in dtypes or not dtypes)}
    tensors |= {n: attrs.evolve(tensors[t], name=n) for n, t in written.items()}
    outputs = _outputs(model, tensors, dtype, str(config.model.param_dtype), dtypes)
    files.check_space(directory, outputs)
    params = source.read()
    if dtype or not dtypes:
        data["dtype"] = data["torch_dtype"] = dtype or config.model.param_dtype  # the latter for transformers 4
    if text is not None and model_family.text:
        complete_text_files(text, data, run_files)
    with create_directory(directory) as partial:
        for name, content in run_files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        _write(partial, data, tensors, outputs, params)


def write_model(
    directory: Path, model_family: Family, data: Json, model: Functional, params: Mapping[str, Any]
) -> None:
    """Write `config.json` and the tensors of a model to an existing directory, without a tokenizer.

    Args:
        directory: The directory.
        model_family: Family of the model.
        data: Content of `config.json`.
        model: The model as pure functions.
        params: Parameters and variables by path.
    """
    tensors = model_family.layout(model, data)
    _write(
        directory,
        data,
        tensors,
        _outputs(model, tensors, None, str(next(iter(model.abstract.values())).dtype), {}),
        params,
    )


def _outputs(
    model: Functional,
    tensors: Mapping[str, Tensor],
    dtype: str | None,
    param_dtype: str,
    imported: Mapping[str, list[str]],
) -> list[files.OutputTensor]:
    """Return the tensors to write, with their dtypes; see `export_run`.

    `imported` maps the names of imported tensors to their dtype code and file.
    """
    default = files.CODES[dtype or param_dtype]
    return [
        (n, _code(model, t) or (default if dtype or n not in imported else imported[n][0]), t.shape)
        for n, t in sorted(tensors.items(), key=lambda item: imported.get(item[0], ["", ""])[1])
    ]


def _write(
    directory: Path,
    data: Json,
    tensors: Mapping[str, Tensor],
    outputs: Sequence[files.OutputTensor],
    params: Mapping[str, Any],
) -> None:
    shards = files.shards(outputs)
    files.write(directory, shards, stream.values(tensors, params, shards))
    (directory / CONFIG).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


def _code(model: Functional, tensor: Tensor) -> str | None:
    """Return the dtype code of a tensor that is not a parameter, or None for a parameter."""
    variable = model.variables.get(tensor.parts[0].path)
    return None if variable is None else files.CODES[str(variable.dtype)]


def _kept_files(run_dir: str | Path) -> dict[str, bytes]:
    """Return name -> content of the files that an import kept in addition to the weights."""
    storage, folder = open_storage(run_dir), f"{KEPT_FOLDER}/"
    names = [f.path.removeprefix(folder) for f in storage.list(folder)]
    if isinstance(storage, LocalStorage):
        for name in names:
            parent, _, file = name.rpartition("/")
            member(
                storage.root / KEPT_FOLDER / (TEMPLATES if parent == TEMPLATES else ""),
                file if parent == TEMPLATES else name,
            )
    return {name: storage.read(f"{folder}{name}") for name in names}


def _describe_run(run_files: Mapping[str, bytes], config: Any, text: TextProcessor | None) -> tuple[Family, Json]:
    """Return the family and `config.json` of a run.

    Uses the `config.json` of the import. A run that was trained or merged from an import uses the one next to its tokenizer.
    These files contain facts that `find_family` cannot determine. If neither describes the run's model anymore, builds a new one.
    """
    data = json.loads(run_files.get(CONFIG, b"{}"))
    if data and (description := _match_config(data, config)):
        return description
    adjacent = json.loads((None if text is None else read_sibling(text.tokenizer, CONFIG)) or b"{}")
    if text is not None and isinstance(adjacent, dict) and adjacent.get("model_type") in families():
        with contextlib.suppress(AttributeError, RequestError):  # it describes a different kind of model
            if context_length(adjacent) == text.context_length and (description := _match_config(adjacent, config)):
                return description
    model_family, new_data = find_family(config)
    token_ids = {k: v for k, v in data.items() if k.endswith("_token_id")}
    facts = model_settings(text, sequence_length(config)) if text is not None and model_family.text else {}
    return model_family, {**facts, **new_data, **token_ids}


def _match_config(data: Json, config: Any) -> tuple[Family, Json] | None:
    """Return the family and the completed `config.json`, or None if it does not describe the run's model."""
    model_family = family(str(data["model_type"]))
    if model_family.differences(data, config):
        return None
    data = {key: value for key, value in data.items() if key != QUANTIZATION}  # an export is not quantized
    return model_family, data | model_family.compatibility_keys(data)


def _report_source(source: Source) -> None:
    for note in source.notes:
        log_message(f"note: {note}")
