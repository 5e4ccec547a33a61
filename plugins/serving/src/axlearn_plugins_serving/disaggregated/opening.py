"""Opens a router for a model at a path or URI."""

from pathlib import Path
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_serving.disaggregated.engine_worker import Settings
from axlearn_plugins_serving.disaggregated.router import RouterEngine
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import OpenedEngine, check_decoder, name_of
from axlearn_plugins_serving.programs import programs_of_run
from axlearn_plugins_transformer.text.processor import text_processor


def open_router(
    uri: str | Path,
    *,
    config: ServingEngine.Config | None = None,
    step: int | None = None,
    programs: str | Path | None = None,
    prefill: int = 1,
    decode: int = 1,
) -> OpenedEngine:
    """Starts the workers of a model, and returns when all of them take requests.

    Args:
        uri: as for `open_engine`.
        config: of each worker's engine; `max_waiting` is the router's.
        step: which checkpoint of a run.
        programs: a directory with exported programs; by default those in a run directory, where there are some.
        prefill: how many processes compute prompts.
        decode: how many processes continue them.

    Raises:
        CheckpointError: no weights there, no such checkpoint, or it is damaged.
        RequestError: the model is not a decoder of tokens, has no tokenizer, or the config does not fit it.
        WorkError: a worker cannot start.
    """
    weights: Any = open_weights(uri, step=step)
    check_decoder(weights.experiment.model)
    text = text_processor(weights.experiment, weights.tokenizer)
    if text is None:
        raise RequestError(
            f"{uri} has no tokenizer, so a server cannot read or write text\n    fix: serve a model of text"
        )
    folder = programs_of_run(uri) if programs is None else Path(programs)
    settings = Settings(
        uri=str(uri), config=config or ServingEngine.Config(), step=step, programs=folder, folder="",
        needs_programs=programs is not None,
    )  # fmt: skip
    engine: Any = RouterEngine(settings, prefill=prefill, decode=decode)
    return OpenedEngine(engine, text, name_of(uri))
