"""`ax.serve`: an engine in this process, for Python."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from axlearn_core.compose import ModelWeights
from axlearn_core.config import patch
from axlearn_core.contracts.parts import Tokenizer
from axlearn_core.errors import RequestError, unknown
from axlearn_core.run import open_weights, split_weights
from axlearn_core.train.inference import LoadedModel
from axlearn_plugins_serving.contracts import (
    FinishReason,
    Output,
    QueueFullError,
    Request,
    Sampling,
    Statistics,
    TokenLogprobs,
)
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_capabilities import HasProgram, ReadsWeights
from axlearn_plugins_serving.generation import Generation, Sample
from axlearn_plugins_serving.open_engine import build_engine, open_engine
from axlearn_plugins_serving.runner import model_weights
from axlearn_plugins_transformer.text.decoding import OutputOptions, OutputText
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor

Prompt = str | Sequence[int]


class LocalEngine:
    """An engine in this process.

    Its methods are thread-safe, and requests from all threads are batched together.

    Args:
        engine: The engine that runs requests.
        text: Text processor of the model. If None, prompts and outputs are always token ids.
    """

    def __init__(self, engine: ServingEngine, text: TextProcessor | None = None):
        self.engine, self.text = engine, text
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._collections: dict[str, _Collection] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, or None."""
        return None if self.text is None else self.text.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        adapter: str | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Continue prompts in one batch, and return when all continuations have ended.

        Args:
            prompts: One or more prompts, each given as text or as token ids.
            sampling: Sampling parameters; the default is the model's own.
            n: Number of samples per prompt. With a seed, sample i uses the seed plus i.
            stop: Texts that end a sample, including special tokens such as `<|im_end|>`. The sample's text ends before the first
                of them.
            adapter: Name of one of the engine's adapters; None uses the base model.
            options: Fields of `Sampling` that override `sampling`, such as `max_tokens=64, temperature=0`. By default, each
                sample includes the log-probabilities of its tokens (`logprobs=0`).

        Raises:
            RequestError: If a prompt or an option is invalid. Nothing is generated.
        """
        if n < 1:
            raise RequestError(f"n is {n}\n    expected: at least 1")
        sampling = _override_sampling(sampling or self._sampling_defaults(logprobs=0), options)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.text is None:
            raise RequestError("this model has no tokenizer, so text cannot stop it\n    fix: use stop_tokens")
        encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        requests = [
            Request(
                id=f"local-{next(self._ids)}",
                prompt=prompt,
                sampling=_offset_seed(sampling, index),
                client="local",
                adapter=adapter,
            )
            for prompt in encoded
            for index in range(n)
        ]
        collections = self._run([(request, self._new_collection(request, stops)) for request in requests])
        return [
            self._build_generation(prompt, collections[index * n : (index + 1) * n])
            for index, prompt in enumerate(encoded)
        ]

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, stop: Sequence[str] = (), **options: Any
    ) -> Iterator[str]:
        """Yield the continuation of a prompt piece by piece.

        A character that spans several tokens is yielded when complete.

        Args:
            prompt: The prompt, as text or as token ids.
            sampling: Sampling parameters; the default is the model's own.
            stop: See `generate`.
            options: Fields of `Sampling` that override `sampling`.

        Raises:
            RequestError: If the model has no tokenizer, or the prompt or an option is invalid.
        """
        if self.text is None:
            raise RequestError("this model has no tokenizer, so it cannot stream text\n    fix: use `generate`")
        tokens = self._encode(prompt)
        sampling = _override_sampling(sampling or self._sampling_defaults(), options)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return self._stream(Request(id=f"local-{next(self._ids)}", prompt=tokens, sampling=sampling), stops)

    def update_weights(self, weights: Any) -> None:
        """Replace the model's weights.

        Requests from other threads continue with the new weights.

        Args:
            weights: Path -> array (parameters and variables of the model, such as `state.params`), a `ModelWeights`, a model of
                the same structure, opened weights, or a path or URI.

        Raises:
            RequestError: If the weights do not fit the model.
        """
        with self._lock:
            self.engine.update_weights(self._model_weights(weights))

    def statistics(self) -> Statistics:
        """Return the state and the counters of the engine."""
        with self._lock:
            return self.engine.statistics()

    def close(self) -> None:
        """Free the devices. Calls that are still running in other threads then raise an error."""
        with self._lock:
            self.engine.close()
            self._fail(RequestError("the engine was closed during generation"))

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: Request, stops: Sequence[str]) -> Iterator[str]:
        collection = self._new_collection(request, stops)
        try:
            with self._lock:
                self._add(request, collection)
            while not collection.finished:
                with self._lock:
                    if not collection.finished:
                        self._step()
                if piece := collection.take_text():
                    yield piece
            collection.check()
        finally:
            self._abort([request])

    def _new_collection(self, request: Request, stops: Sequence[str]) -> "_Collection":
        options = OutputOptions(stops=tuple(stops), min_tokens=request.sampling.min_tokens)
        return _Collection(None if self.text is None else self.text.output(request.prompt, options))

    def _sampling_defaults(self, logprobs: int | None = None) -> Sampling:
        defaults: dict[str, Any] = {} if self.text is None else dict(self.text.sampling)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return Sampling(**defaults, logprobs=logprobs)

    def _run(self, requests: Sequence[tuple[Request, "_Collection"]]) -> list["_Collection"]:
        collections = [collection for _, collection in requests]
        waiting = deque(requests)
        try:
            while waiting or not all(c.finished for c in collections):
                with self._lock:
                    while waiting:
                        try:
                            self._add(*waiting[0])
                        except QueueFullError:
                            break
                        waiting.popleft()
                    if not all(c.finished for c in collections):
                        self._step()
            for collection in collections:
                collection.check()
        finally:
            self._abort([request for request, _ in requests])
        return collections

    def _add(self, request: Request, collection: "_Collection") -> None:
        self.engine.add(request)
        self._collections[request.id] = collection

    def _step(self) -> None:
        """Run one step for all callers. The caller must hold the lock."""
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._fail(error)
            raise
        for output in outputs:
            collection = self._collections[output.id]
            collection.take(output)
            if collection.finished:
                del self._collections[output.id]
                if output.finish is None:  # ended by a stop string
                    self.engine.abort(output.id)

    def _fail(self, error: Exception) -> None:
        for collection in self._collections.values():
            collection.error, collection.finish = error, "error"
        self._collections.clear()

    def _abort(self, requests: Sequence[Request]) -> None:
        """Abort the unfinished requests of a caller that was interrupted or stopped iterating."""
        with self._lock:
            for request in requests:
                if self._collections.pop(request.id, None) is not None:
                    self.engine.abort(request.id)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.text is None:
            raise RequestError("this model has no tokenizer\n    fix: pass prompts as token ids")
        return tuple(self.text.encode_prompt(prompt))

    def _build_generation(self, prompt: tuple[int, ...], collections: Sequence["_Collection"]) -> Generation:
        samples = tuple(
            Sample(
                tokens=tuple(c.tokens),
                text=c.take_text(),
                logprobs=None if c.logprobs is None else tuple(c.logprobs),
                finish=c.finish or "abort",
            )
            for c in collections
        )
        first = collections[0]
        return Generation(
            prompt=prompt, samples=samples, prompt_logprobs=first.prompt_logprobs, cached_tokens=first.cached_tokens
        )

    def _model_weights(self, weights: Any) -> ModelWeights:
        runner: Any = self.engine.runner
        if isinstance(weights, ModelWeights) or not isinstance(runner, HasProgram):
            return weights
        functional = runner.program.functional
        if isinstance(weights, (str, Path)):
            weights = open_weights(weights)
        if isinstance(weights, Mapping):
            return ModelWeights(*split_weights(weights, functional))
        if isinstance(weights, ReadsWeights):
            return ModelWeights(*split_weights(weights.read("**"), functional))
        return model_weights(functional, weights)


class _Collection:
    """The output of one request, up to the first stop string."""

    def __init__(self, output: OutputText | None) -> None:
        self._output = output
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.finish is not None

    def take(self, output: Output) -> None:
        count = self._push(output.tokens)
        self.tokens += output.tokens[:count]
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs[:count]]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens, self.finish = output.cached_tokens, output.finish
        if output.error is not None:
            self.error = RequestError(output.error)
        if self._output is not None and self._output.stopped:
            self.finish = "stop"
        elif self._output is not None and self.finished:
            self._pieces.append(self._output.end())

    def _push(self, tokens: Sequence[int]) -> int:
        """Decode tokens up to the one that completes a stop string.

        Return the number of decoded tokens.
        """
        if self._output is None:
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            self._pieces.append(self._output.push(token))
            if self._output.stopped:
                return count
        return len(tokens)

    def take_text(self) -> str | None:
        """Return the text since the last call, or None if the model has no tokenizer."""
        if self._output is None:
            return None
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def serve(
    model: Any,
    *,
    tokenizer: Tokenizer | None = None,
    text: TextProcessor | None = None,
    program: Any = None,
    config: ServingEngine.Config | None = None,
    set: Mapping[str, Any] | None = None,  # named after the command-line option
    step: int | None = None,
    warm_up: bool = True,
) -> LocalEngine:
    """Open an engine in this process.

        with ax.serve("runs/mine") as engine:
            print(engine.generate("def ", max_tokens=32, temperature=0)[0].text)

    Args:
        model: Run directory, directory in Hugging Face format, exported adapters, or a URI that a plugin can open; or the
            result of `ax.load`; or a model with its weights.
        tokenizer: Tokenizer for prompts and outputs; the default is the model's own.
        text: Text processor to use instead of `tokenizer`. It also sets end tokens, chat template, sampling defaults and context
            length.
        program: Program of the model's experiment, which sets the devices.
        config: Config of the engine.
        set: Settings for the engine, as path -> value: `{"runner.max_rows": 32}`.
        step: Checkpoint of a run to open; the default is the newest.
        warm_up: Whether to compile all functions first. Otherwise, each is compiled on first use.

    Raises:
        CheckpointError: If there are no weights or no such checkpoint, or the checkpoint is damaged.
        RequestError: If the model does not generate tokens or the settings do not fit.
    """
    config = patch(config or ServingEngine.Config(), dict(set or {}))
    text_override = text or (None if tokenizer is None else TextProcessor.Config().build(tokenizer=tokenizer))
    if isinstance(model, (str, Path)):
        opened = open_engine(model, config=config, step=step, warm_up=warm_up)
        return LocalEngine(opened.engine, text_override or opened.text)
    if isinstance(model, LoadedModel):
        text = text_override or (None if model.tokenizer is None else text_processor(model.config, model.tokenizer))
        program, model = program or model.program, model.model
    engine = build_engine(model, program=program, text=text or text_override, config=config, warm_up=warm_up)
    return LocalEngine(engine, text or text_override)


def _as_prompts(prompts: Any) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return (
        [prompts] if prompts and not isinstance(prompts[0], str) and not isinstance(prompts[0], Iterable) else prompts
    )


def _override_sampling(sampling: Sampling, options: Mapping[str, Any]) -> Sampling:
    names = [a.name for a in attrs.fields(Sampling)]
    for name in options:
        if name not in names:
            raise unknown("option of sampling", name, names)
    return attrs.evolve(sampling, **options)


def _offset_seed(sampling: Sampling, index: int) -> Sampling:
    return sampling if sampling.seed is None or not index else attrs.evolve(sampling, seed=sampling.seed + index)
