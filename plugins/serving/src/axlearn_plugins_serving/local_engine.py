"""`ax.serve`: an engine in this process, for Python."""

import contextlib
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
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
from axlearn_plugins_serving.contracts import QueueFullError, Request, Sampling, Statistics
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_capabilities import HasProgram, ReadsWeights
from axlearn_plugins_serving.engine_weights import model_weights
from axlearn_plugins_serving.generation import Generation
from axlearn_plugins_serving.open_engine import build_engine, open_engine
from axlearn_plugins_serving.pending_sample import PendingSample, build_generation
from axlearn_plugins_serving.turn_lock import TurnLock
from axlearn_plugins_transformer.text.decoding import OutputOptions
from axlearn_plugins_transformer.text.processor import TextProcessor, text_processor

Prompt = str | Sequence[int]


class LocalEngine:
    """An engine in this process.

    Its methods are thread-safe, and requests from all threads are batched together. Requests of one call start together, so their
    results do not depend on timing. `generate` and `stream` run the engine in the thread that calls them. `submit` runs it in a
    thread of its own, which ends when all submitted requests have ended.

    Args:
        engine: The engine that runs requests.
        text: Text processor of the model. If None, prompts and outputs are always token ids.
    """

    def __init__(self, engine: ServingEngine, text: TextProcessor | None = None):
        self.engine, self.text = engine, text
        self._turns = TurnLock()  # for the engine and the samples that it runs
        self._running: dict[str, PendingSample] = {}
        self._guard = threading.Lock()  # for the attributes below; never held during a step
        self._unfinished: dict[str, PendingSample] = {}
        self._queue: deque[PendingSample] = deque()
        self._aborted: list[str] = []
        self._driver: threading.Thread | None = None
        self._closed = False
        self._ended: deque[PendingSample] = deque()  # samples whose futures must be resolved
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, or None."""
        return None if self.text is None else self.text.tokenizer

    @property
    def version(self) -> int:
        """The version of the weights: 0 at first, and then the number that `update_weights` sets."""
        return self.engine.version

    @property
    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self.engine.is_sleeping

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        seeds: Sequence[Sequence[int]] | None = None,
        stop: Sequence[str] = (),
        adapter: str | None = None,
        extras: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Continue prompts in one batch, and return when all continuations have ended.

        Args:
            prompts: One or more prompts, each given as text or as token ids.
            sampling: Sampling parameters; the default is the model's own.
            n: Number of samples per prompt. With a seed, sample i uses the seed plus i.
            seeds: Seed of each sample: for each prompt, a sequence of n integers. They replace the seed of `sampling`.
            stop: Texts that end a sample, including special tokens such as `<|im_end|>`. The sample's text ends before the first
                of them.
            adapter: Name of one of the engine's adapters; None uses the base model.
            extras: Other inputs of the model for each prompt, by name, [1, ...] each. Needs `runner.extras`.
            options: Fields of `Sampling` that override `sampling`, such as `max_tokens=64, temperature=0`. By default, each
                sample includes the log-probabilities of its tokens (`logprobs=0`).

        Raises:
            RequestError: If a prompt or an option is invalid. Nothing is generated.
        """
        if n < 1:
            raise RequestError(f"n is {n}\n    expected: at least 1")
        sampling = _override_sampling(sampling or self._sampling_defaults(logprobs=0), options)
        encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        rows = _sample_seeds(sampling, n, len(encoded), seeds)
        inputs = [{}] * len(encoded) if extras is None else extras
        if len(inputs) != len(encoded):
            raise RequestError(f"extras has {len(inputs)} entries\n    expected: {len(encoded)}, one for each prompt")
        requests = [
            Request(
                id=self._new_id(),
                prompt=prompt,
                sampling=attrs.evolve(sampling, seed=seed),
                client="local",
                adapter=adapter,
                extras=others,
            )
            for prompt, row, others in zip(encoded, rows, inputs, strict=True)
            for seed in row
        ]
        samples = self._enqueue(requests, stop)
        try:
            for sample in samples:
                self._run_until_finished(sample)
            for sample in samples:
                sample.check()
        finally:
            self._abort(samples)
        return [build_generation(samples[begin : begin + n]) for begin in range(0, len(samples), n)]

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
        return self._stream(Request(id=self._new_id(), prompt=tokens, sampling=sampling), stop)

    def submit(self, request: Request, *, stop: Sequence[str] = ()) -> "Future[Generation]":
        """Start a request and return a future of its result.

        Cancel the future to abort the request. Use `asyncio.wrap_future` to await it.

        Args:
            request: The request. Its `sampling` is used as it is; log-probabilities are not added.
            stop: See `generate`.

        Returns:
            A future of a `Generation` with one sample. It raises the error of the engine if the engine fails or is closed.

        Raises:
            RequestError: If the request is invalid. Nothing is started.
        """
        return self.submit_all([request], stop=stop)[0]

    def submit_all(self, requests: Sequence[Request], *, stop: Sequence[str] = ()) -> "list[Future[Generation]]":
        """Start requests together and return a future for each; see `submit`.

        If the engine is idle before, has no drafter and has `runner.decode_steps=1`, its steps do not depend on timing.

        Raises:
            RequestError: If a request is invalid. Nothing is started.
        """
        samples = self._enqueue(requests, stop, futures=True)
        futures = [sample.future for sample in samples if sample.future is not None]
        for sample, future in zip(samples, futures, strict=True):
            future.add_done_callback(functools.partial(self._abort_cancelled, sample))
        with self._guard:
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="local-engine", daemon=True)
                self._driver.start()
        return futures

    def update_weights(self, weights: Any, version: int | None = None, *, share: bool = False) -> int:
        """Replace the model's weights, and return the number of bytes that were copied.

        Requests from other threads continue with the new weights.

        Args:
            weights: Path -> array (parameters and variables of the model, such as `state.params`), a `ModelWeights`, a model of
                the same structure, opened weights, or a path or URI.
            version: Version of the weights. Samples tell which versions drew their tokens. The default is one more than the current
                version.
            share: Whether the engine may read the given arrays themselves, if shape, dtype and sharding are those of its own.
                After a training step has donated them, generating raises an error until the weights are updated again. By
                default, all arrays are copied.

        Raises:
            RequestError: If the weights do not fit the model.
        """
        converted = self._model_weights(weights)
        with self._turn():
            return self.engine.update_weights(converted, version, share=share)

    def statistics(self) -> Statistics:
        """Return the state and the counters of the engine."""
        with self._turn():
            return self.engine.statistics()

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the cache and the weights until `wake_up`. New requests are rejected.

        Args:
            level: 1 keeps the weights in the memory of the host. 2 drops them, and `wake_up` reads them from their source again.

        Raises:
            RequestError: If requests are running, the level is unknown, or the weights have no source that can be read again.
        """
        with self._turn():
            self._admit()
            self.engine.sleep(level)

    def wake_up(self) -> None:
        """Restore the weights, and an empty cache. See `sleep`."""
        with self._turn():
            self.engine.wake_up()

    def close(self) -> None:
        """Free the devices. Calls that are still running in other threads, and futures, then raise an error."""
        with self._turn():
            with self._guard:
                self._closed = True
            self.engine.close()
            self._fail(RequestError("the engine was closed during generation"))
            self._aborted.clear()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_id(self) -> str:
        return f"local-{next(self._ids)}"

    def _stream(self, request: Request, stop: Sequence[str]) -> Iterator[str]:
        (sample,) = samples = self._enqueue([request], stop)
        try:
            while not sample.finished:
                self._run_step(sample)
                if piece := sample.take_text():
                    yield piece
            sample.check()
        finally:
            self._abort(samples)

    def _enqueue(
        self, requests: Sequence[Request], stop: Sequence[str], *, futures: bool = False
    ) -> list[PendingSample]:
        """Check requests and queue all of them, or none."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.text is None:
            raise RequestError("this model has no tokenizer, so text cannot stop it\n    fix: use stop_tokens")
        for request in requests:
            self.engine.check(request)
            if request.embeds:
                raise RequestError("a LocalEngine continues prompts\n    got: a request with embeds=True")
        limits = {request.sampling.min_tokens for request in requests}
        options = {number: OutputOptions(stops=stops, min_tokens=number) for number in limits}
        samples = [
            PendingSample(
                request,
                None if self.text is None else self.text.output(request.prompt, options[request.sampling.min_tokens]),
                Future() if futures else None,
            )
            for request in requests
        ]
        counts = Counter(request.id for request in requests)
        with self._guard:
            if self._closed:
                raise RequestError("the engine is closed\n    fix: open a new engine")
            if repeated := [id for id, count in counts.items() if count > 1 or id in self._unfinished]:
                raise RequestError(
                    f"request {repeated[0]!r} is not finished yet\n    fix: use a unique id for each request"
                )
            self._unfinished.update((sample.request.id, sample) for sample in samples)
            self._queue.extend(samples)
        return samples

    def _sampling_defaults(self, logprobs: int | None = None) -> Sampling:
        defaults: dict[str, Any] = {} if self.text is None else dict(self.text.sampling)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return Sampling(**defaults, logprobs=logprobs)

    def _run_until_finished(self, sample: PendingSample) -> None:
        while not sample.finished:
            self._run_step(sample)

    def _run_step(self, sample: PendingSample | None = None) -> None:
        """Run a step for all callers, unless the sample has finished before it is this thread's turn."""
        with self._turn():
            if sample is None or not sample.finished:
                self._advance()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for this thread's turn to use the engine. Afterwards, resolve futures, whose callbacks may call this object."""
        try:
            with self._turns:
                yield
        finally:
            while self._ended:
                with contextlib.suppress(IndexError):  # another thread took it
                    self._ended.popleft().resolve()

    def _advance(self) -> None:
        """Start queued requests, run one step and deliver its outputs. The caller must have the turn."""
        try:
            self._admit()
            for output in self.engine.step():
                sample = self._running.get(output.id)
                if sample is None or sample.finished:  # ended by a stop text, or cancelled
                    continue
                sample.take(output)
                if sample.finished:
                    self._end(sample)
                    if output.finish is None:
                        self.engine.abort(output.id)
        except Exception as error:
            self._fail(error)
            raise

    def _admit(self) -> None:
        """Abort the requests that callers gave up, and give the engine as many queued ones as it accepts."""
        with self._guard:
            for id in self._aborted:
                self.engine.abort(id)
                self._running.pop(id, None)
            self._aborted.clear()
            while self._queue:
                sample = self._queue[0]
                if not sample.finished:
                    try:
                        self.engine.add(sample.request)
                    except QueueFullError:
                        return
                    except RequestError as error:  # for example, its adapter was removed
                        sample.fail(error)
                        self._forget(sample)
                    else:
                        self._running[sample.request.id] = sample
                self._queue.popleft()

    def _end(self, sample: PendingSample) -> None:
        with self._guard:
            self._forget(sample)
        del self._running[sample.request.id]

    def _forget(self, sample: PendingSample) -> None:
        """Remove a sample that has ended from the unfinished ones. The caller must have the guard."""
        if self._unfinished.get(sample.request.id) is sample:
            del self._unfinished[sample.request.id]
            self._ended.append(sample)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error. The caller must have the turn."""
        with self._guard:
            self._aborted += self._running  # they have already ended if the engine failed
            self._running.clear()
            self._queue.clear()
            for sample in list(self._unfinished.values()):
                sample.fail(error)
                self._forget(sample)

    def _abort_cancelled(self, sample: PendingSample, future: "Future[Generation]") -> None:
        if future.cancelled():
            self._give_up([sample])

    def _give_up(self, samples: Sequence[PendingSample]) -> bool:
        """Mark unfinished samples as aborted. Return True if there are any."""
        with self._guard:
            unfinished = [sample for sample in samples if not sample.finished]
            for sample in unfinished:
                sample.abort()
                self._forget(sample)
                self._aborted.append(sample.request.id)
        return bool(unfinished)

    def _abort(self, samples: Sequence[PendingSample]) -> None:
        """Abort the unfinished requests of a caller that was interrupted or stopped iterating."""
        if self._give_up(samples):
            with self._turn():
                self._admit()

    def _drive(self) -> None:
        """Run steps until no submitted request is left."""
        while self._has_futures():
            with contextlib.suppress(Exception):  # `_advance` has given it to the futures
                self._run_step()

    def _has_futures(self) -> bool:
        """Return True if the driver must run a step. Otherwise, the driver ends, and the next `submit` starts a new one."""
        with self._guard:
            if self._aborted or any(sample.future is not None for sample in self._unfinished.values()):
                return True
            self._driver = None
            return False

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.text is None:
            raise RequestError("this model has no tokenizer\n    fix: pass prompts as token ids")
        return tuple(self.text.encode_prompt(prompt))

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


def _sample_seeds(
    sampling: Sampling, n: int, num_prompts: int, seeds: Sequence[Sequence[int]] | None
) -> Sequence[Sequence[int | None]]:
    """Return the seeds of the samples of each prompt."""
    if seeds is None:
        seed = sampling.seed
        return [[None if seed is None else seed + index for index in range(n)]] * num_prompts
    if len(seeds) != num_prompts or any(len(row) != n for row in seeds):
        raise RequestError(
            "the seeds do not fit the samples\n"
            f"    got: {[len(row) for row in seeds]} seeds per prompt\n    expected: {n} for each of {num_prompts} prompts"
        )
    return [[int(seed) for seed in row] for row in seeds]


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
