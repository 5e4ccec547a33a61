"""Run directories made of Hugging Face models, and the other way round."""

import contextlib
import functools
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint import LocalStorage, open_storage
from axlearn_core.compose import Functional, compose
from axlearn_core.compose.devices import configure_devices
from axlearn_core.contracts.experiment import checkpoint_uri, sequence_length
from axlearn_core.errors import RequestError
from axlearn_core.run import Run, derive_run
from axlearn_core.run.derive import appearing, local_target, new_directory
from axlearn_core.run.notices import log_message
from axlearn_core.train.api import provenance
from axlearn_plugins_models.huggingface import files, stream
from axlearn_plugins_models.huggingface.export_text import KEPT, complete_text_files, model_settings, read_beside
from axlearn_plugins_models.huggingface.family import Family, Json, families, family, family_of
from axlearn_plugins_models.huggingface.members import member
from axlearn_plugins_models.huggingface.source import Source, open_model
from axlearn_plugins_models.huggingface.table import Tensor, layout
from axlearn_plugins_models.huggingface.text_facts import CONFIG, context_length
from axlearn_plugins_models.huggingface.weights import DirectoryWeights
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor

TENSORS = "tensors.json"
TEMPLATES = "additional_chat_templates"
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")


def import_run(directory: Path, run_dir: Path, *, with_: Iterable[str] = (), set: Iterable[str] = ()) -> Source:
    """Writes a run at step 0 with the weights of a model directory; it appears in one piece.

    The run holds weights only: a training that begins with it begins its optimizer's state.

    Args:
        directory: a model in Hugging Face format.
        run_dir: the new run.
        with_: features to add to the experiment, as on the command line.
        set: settings to make in it.

    Raises:
        RequestError: the directory is not what it says, or `run_dir` is taken; nothing was written.
        WorkError: it cannot be written.
    """
    new_directory(run_dir)
    configure_devices(None)
    source = open_model(directory, with_=with_, set=set)
    config = source.config
    if (uri := checkpoint_uri(config)) is not None:
        raise RequestError(
            f"checkpointer.uri: an import keeps its checkpoint in RUN_DIR\n    got: {uri}\n"
            "    fix: import without it; a run of its own that keeps its checkpoints there begins with these weights by\n"
            "    --set 'loop={type: start-from-run, run_dir: RUN_DIR}'"
        )

    def read(weights: DirectoryWeights) -> Mapping[str, Any]:
        state = compose(config).state
        places = {path: spec.sharding for path, spec in {**state.params, **state.variables}.items()}
        tensors = weights.read("**", places)
        _report_source(source)
        return tensors

    lock = {"imported_from": str(directory), "provenance": provenance(source.resolved)}
    derive_run(
        DirectoryWeights(source),
        run_dir,
        config,
        read,
        new_step=0,
        lock=lock,
        add_files=functools.partial(_keep, source),
    )
    return source


def _keep(source: Source, run_dir: Path) -> None:
    """What an export needs that the run does not: the small files, and how the tensors were stored."""
    folder = run_dir / KEPT
    folder.mkdir()
    for file in {f for pattern in SIDE_FILES for f in source.directory.glob(pattern)}:
        if file.name != files.INDEX:
            shutil.copyfile(member(source.directory, file.name), folder / file.name)
    for file in source.directory.glob(f"{TEMPLATES}/*.jinja"):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(member(source.directory / TEMPLATES, file.name), folder / TEMPLATES / file.name)
    stored = {n: [s.dtype, s.file.name] for n, s in source.stored.items()}
    (folder / TENSORS).write_text(json.dumps(stored) + "\n", "utf-8")


def export_run(
    run_dir: str | Path, directory: str | Path, *, step: int | None = None, dtype: str | None = None
) -> None:
    """Writes the model of a run in Hugging Face format; it appears in one piece.

    Args:
        run_dir: the run, or the URI of one.
        directory: where; it must not be there yet.
        step: which checkpoint; by default the newest.
        dtype: of the parameters; by default that of the files that the run was imported from, else their own. Other
            variables keep theirs.

    Raises:
        RequestError: it is not a run, nothing in the format describes its model, or `directory` is taken.
        WorkError: it cannot be written.
    """
    directory = local_target(directory)
    if directory.exists():
        raise RequestError(f"{directory} is there already; nothing was written\n    fix: give another DIR")
    configure_devices(None)
    source = Run(run_dir).weights(step)
    config: Any = source.experiment
    run_files = _kept_files(run_dir)
    text = text_processor(config)
    model_family, data = _describe_run(run_files, config, text)
    model = Functional.of(config.model)
    tensors = layout(model, model_family.table(model))
    dtypes: dict[str, list[str]] = json.loads(run_files.pop(TENSORS, b"{}"))
    own = files.CODES[dtype or str(config.model.param_dtype)]
    outputs = [
        (n, _code(model, t) or (own if dtype or n not in dtypes else dtypes[n][0]), t.shape)
        for n, t in sorted(tensors.items(), key=lambda item: dtypes.get(item[0], ["", ""])[1])
    ]
    files.check_space(directory, outputs)
    params = source.read()
    if dtype or not dtypes:
        data["dtype"] = data["torch_dtype"] = dtype or config.model.param_dtype  # the latter for transformers 4
    if text is not None and model_family.text:
        complete_text_files(text, data, run_files)
    with appearing(directory) as partial:
        shards = files.shards(outputs)
        files.write(partial, shards, stream.values(tensors, params, shards))
        for name, content in run_files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        (partial / CONFIG).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


def _code(model: Functional, tensor: Tensor) -> str | None:
    """The file's name for the dtype of a tensor that is not a parameter."""
    variable = model.variables.get(tensor.parts[0].path)
    return None if variable is None else files.CODES[str(variable.dtype)]


def _kept_files(run_dir: str | Path) -> dict[str, bytes]:
    """Name -> content of what an import kept of the model directory in addition to the weights."""
    storage, folder = open_storage(run_dir), f"{KEPT}/"
    names = [f.path.removeprefix(folder) for f in storage.list(folder)]
    if isinstance(storage, LocalStorage):
        for name in names:
            parent, _, file = name.rpartition("/")
            member(
                storage.root / KEPT / (TEMPLATES if parent == TEMPLATES else ""), file if parent == TEMPLATES else name
            )
    return {name: storage.read(f"{folder}{name}") for name in names}


def _describe_run(run_files: Mapping[str, bytes], config: Any, text: TextProcessor | None) -> tuple[Family, Json]:
    """The family and `config.json` of a run.

    Takes the `config.json` that it was imported with, or the one beside its tokenizer, which runs have that were trained or merged
    from an import, with all that `family_of` cannot know. If neither describes the run's model any more, makes a new one.
    """
    data = json.loads(run_files.get(CONFIG, b"{}"))
    if data and (description := _match_config(data, config)):
        return description
    beside = json.loads((None if text is None else read_beside(text.tokenizer, CONFIG)) or b"{}")
    if text is not None and isinstance(beside, dict) and beside.get("model_type") in families():
        with contextlib.suppress(AttributeError, RequestError):  # it is not of such a model
            if context_length(beside) == text.context_length and (description := _match_config(beside, config)):
                return description
    model_family, fresh = family_of(config)
    same = {k: v for k, v in data.items() if k.endswith("_token_id")}
    facts = model_settings(text, sequence_length(config)) if text is not None and model_family.text else {}
    return model_family, {**facts, **fresh, **same}


def _match_config(data: Json, config: Any) -> tuple[Family, Json] | None:
    """The family and the completed `config.json`, if it describes the model of a run."""
    model_family = family(str(data["model_type"]))
    return None if model_family.differences(data, config) else (model_family, data | model_family.missing(data))


def _report_source(source: Source) -> None:
    for note in source.notes:
        log_message(f"note: {note}")
