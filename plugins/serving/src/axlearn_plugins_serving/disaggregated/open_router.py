"""Open a router for a model at a path or URI."""

from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_serving.disaggregated.engine_worker import Settings
from axlearn_plugins_serving.disaggregated.router import RouterEngine
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import (
    OpenedEngine,
    PrepareText,
    Report,
    check_decoder,
    ignore_phase,
    keep_text,
    model_name,
)
from axlearn_plugins_serving.programs import find_run_programs
from axlearn_plugins_transformer.text.processor import text_processor


def open_router(
    uri: str | Path,
    *,
    config: ServingEngine.Config | None = None,
    step: int | None = None,
    programs: str | Path | None = None,
    prefill: int = 1,
    decode: int = 1,
    prepare_text: PrepareText = keep_text,
    report: Report = ignore_phase,
) -> OpenedEngine:
    """Start a model's workers and return when all of them accept requests.

    Args:
        uri: See `open_engine`.
        config: Config of each worker's engine; `max_waiting` applies to the router.
        step: Checkpoint of a run; the default is the newest.
        programs: Directory with exported programs; the default is the one in the run directory, if it exists.
        prefill: Number of processes that compute prompts.
        decode: Number of processes that generate outputs.
        prepare_text: See `open_engine`.
        report: Called when a phase begins.

    Raises:
        CheckpointError: If there are no weights or no such checkpoint, or the checkpoint is damaged.
        RequestError: If the model does not generate tokens or has no tokenizer, or the config does not fit it.
        WorkError: If a worker cannot start.
    """
    report(f"opening {uri}")
    weights: Any = open_weights(uri, step=step)
    check_decoder(weights.experiment.model)
    text = prepare_text(text_processor(weights.experiment, weights.tokenizer))
    if text is None:
        raise RequestError(
            f"{uri} has no tokenizer, so the server cannot read or write text\n    fix: serve a model with a tokenizer"
        )
    folder = find_run_programs(uri) if programs is None else Path(programs)
    settings = Settings(
        uri=str(uri), config=config or ServingEngine.Config(), step=step, programs=folder, folder="",
        needs_programs=programs is not None,
    )  # fmt: skip
    report(f"starting {prefill} prefill and {decode} decode processes")
    engine: Any = RouterEngine(settings, prefill=prefill, decode=decode)
    return OpenedEngine(engine, text, model_name(uri))
