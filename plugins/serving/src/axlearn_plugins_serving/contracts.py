"""Interfaces between the server, the engine and the runner.

A server (HTTP, a command, an evaluator) adds requests to an `Engine` and calls `step` from one thread. The engine chooses
which tokens each step computes and which cache blocks store them. A `Runner` computes the step on devices. This module does not
import JAX.

Positions start at 0 at a request's first prompt token. A block stores `block_size` consecutive positions of a request.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from axlearn_core.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end token, a stop token or a completed constraint ended the output. `length`: `max_tokens` was reached or the context
is full."""


class QueueFullError(RequestError):
    """Raised if the queue of waiting requests is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of a request.

    They apply in this order: `logit_bias`, `repetition_penalty`, the other penalties, `min_tokens` and `bad_tokens`,
    `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        max_tokens: Maximum number of output tokens; None generates until the context is full.
        temperature: Sampling temperature; 0 always picks the most likely token.
        top_k: Number of most likely tokens to sample from; None samples from all.
        top_p: Sample from the smallest set of tokens with at least this total probability (Holtzman et al., 2020). 0 always picks
            the most likely token.
        min_p: Minimum probability of a token, relative to the most likely one (Nguyen et al., 2024).
        seed: Seed for sampling. The same seed produces the same tokens in any batch. None picks a random seed.
        presence_penalty: Subtracted from the logit of each token that is already in the output.
        frequency_penalty: Subtracted from a token's logit once for each occurrence of the token in the output.
        repetition_penalty: Divides the positive logits of the tokens in the prompt and the output, and multiplies the negative
            ones (Keskar et al., 2019). 1 changes nothing.
        min_tokens: Number of output tokens before which no end token or stop token is chosen.
        bad_tokens: Sequences of tokens that the output never contains. The last token of a sequence is not chosen after the others.
        logit_bias: Token -> value added to its logit.
        stop_tokens: Tokens that end the output, in addition to the tokenizer's end token. The output excludes the token that
            ended it.
        ignore_end: Whether to continue after the end token.
        logprobs: Number of most likely tokens to report with each output token's log-probability; None reports nothing.
            Log-probabilities come from the model's distribution, before bias, penalties and temperature.
        sampling_logprobs: Whether to report each output token's log-probability in the distribution that it was drawn from, after
            all these parameters and masks. Needs `logprobs`. If the most likely token is always chosen, the value is 0.
        prompt_logprobs: Number of most likely tokens to report with the log-probability of each prompt token after the first.
            True reports as many as `logprobs`. None and False report nothing.
        records: Whether to report what the layers of the model record for each token, such as the experts of routers.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    logprobs: int | None = None
    sampling_logprobs: bool = False
    prompt_logprobs: int | None = None
    records: bool = False

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def adjusts_logits(self) -> bool:
        """True if a bias or a penalty changes the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(self.logit_bias or penalties)

    @property
    def scores_prompt(self) -> bool:
        """True if the request wants log-probabilities of the prompt."""
        return self.prompt_logprobs is not None and self.prompt_logprobs is not False

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of most likely tokens to report at each position of the prompt."""
        return (self.logprobs or 0) if self.prompt_logprobs is True else int(self.prompt_logprobs or 0)


class Constraint(Protocol):
    """A constraint on the output, such as a JSON schema.

    Each request has its own; the engine calls it between steps. If a method raises an exception, the request ends with an error. A
    `RequestError` means that the request is wrong, such as a grammar that needs too much work for one token.
    """

    def mask(self) -> np.ndarray:
        """Return the mask of allowed tokens, uint32 [ceil(vocab_size / 32)].

        Bit i % 32 of word i // 32 is set if token i may come next.
        """
        ...

    def accept(self, token: int) -> bool:
        """Advance by the chosen token. Returns True if the output is complete."""
        ...


@runtime_checkable
class HasGrammar(Protocol):
    """A constraint that another process can rebuild.

    Attributes:
        grammar: The grammar that the constraint is built from.
    """

    grammar: str


def _copy_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return copies that cannot change, because the cache knows a prompt by the contents of its extras."""
    copies: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        try:
            copies[name] = np.array(value)
        except ValueError as error:
            raise RequestError(
                f"extras[{name!r}] is not an array: {error}\n    expected: an array of numbers"
            ) from error
        copies[name].setflags(write=False)
    return copies


@attrs.frozen(kw_only=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: Id of the request, unique among unfinished requests.
        prompt: Token ids; at least one.
        priority: Smaller values run first. Requests with equal priority run in order of arrival.
        client: Client that sent the request. Waiting clients of the same priority take turns.
        adapter: Name of a LoRA adapter; None uses the base model.
        embeds: Whether to return the embedding of the prompt instead of continuing it. See `EmbedsTokens`.
        extras: Other inputs of the model by name, [1, ...] each, such as the features of images. See `TakesExtras`.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    priority: int = 0
    client: str = ""
    adapter: str | None = None
    embeds: bool = False
    extras: Mapping[str, np.ndarray] = attrs.field(factory=dict, eq=False, converter=_copy_arrays)


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position.

    Attributes:
        token: The token at this position.
        logprob: Log-probability of `token` in the model's distribution.
        top: The most likely tokens and their log-probabilities in the model's distribution, best first.
        sampling_logprob: Log-probability of `token` in the distribution that it was drawn from; None if not requested.
        kept: Tokens that could be drawn, int32 [W], padded with -1. All are -1 if there were more than W. None if they are not
            reported.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    sampling_logprob: float | None = None
    kept: np.ndarray | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class Output:
    """The result of a step for one request.

    The last output of a request sets `finish`.

    Attributes:
        id: Id of the request.
        tokens: New tokens.
        logprobs: One entry for each of `tokens`, if requested.
        prompt_logprobs: One entry for each prompt token after the first, if requested; only in the first output.
        finish: Reason why the request ended; None while it is running.
        stop_token: Token that ended the output. It is not in `tokens`.
        stop_logprobs: Log-probabilities of `stop_token`, if requested.
        version: Version of the weights that drew `tokens` and `stop_token`; see `Engine.version`.
        cached_tokens: Number of prompt tokens that were already in the cache.
        error: Error message if `finish` is "error".
        request_wrong: Whether the request is the cause of `error`.
        started: When the request left the queue for the first time, from `time.monotonic`; None if unknown.
        embedding: Embedding of the prompt, float32 [D], if the request embeds.
        records: Records of the tokens by name, if requested; only in the last output. See `RecordsTokens.read_records`.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    stop_logprobs: TokenLogprobs | None = None
    version: int = 0
    cached_tokens: int = 0
    error: str | None = None
    request_wrong: bool = False
    started: float | None = None
    embedding: np.ndarray | None = attrs.field(default=None, eq=False)
    records: Mapping[str, np.ndarray] | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class Statistics:
    """The state of an engine and its counters since it started.

    Attributes:
        waiting: Requests in the queue.
        running: Requests that hold blocks.
        blocks: Blocks in the cache.
        used_blocks: Blocks that requests hold.
        cached_blocks: Blocks that no request holds but that later prompts can reuse.
        prompt_tokens: Prompt tokens of all admitted requests.
        cached_prompt_tokens: Prompt tokens that were already in the cache.
        output_tokens: Output tokens so far.
        preemptions: Number of times a request lost its blocks to a different request.
        steps: Calls to the runner.
        compilations: Compilations since warm-up; any value other than 0 indicates a bug.
        step_seconds: Time spent submitting steps to the runner and waiting for it.
        drafted_tokens: Tokens that the drafter proposed.
        accepted_tokens: Drafted tokens that the model accepted.
        drafter: Name of the drafter's class, or None if the engine has no drafter.
        host_seconds: Time spent planning steps and reading results while the runner computes.
    """

    waiting: int
    running: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    compilations: int
    step_seconds: float
    host_seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafter: str | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that the model accepted, or None if no token was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


class Engine(Protocol):
    """Continues many prompts at the same time.

    Call its methods from a single thread.

    Attributes:
        vocab_size: Token ids are 0 to `vocab_size` - 1.
        max_context: Maximum number of tokens in a prompt and its output.
        version: Version of the weights: 0 at first, and then the number that `update_weights` sets.

    An engine may also implement `PacesSteps`, `Sleeps`, `ChangesAdapters` or `NormalizesEmbeddings`.
    """

    vocab_size: int
    max_context: int
    version: int

    def add(self, request: Request) -> None:
        """Add a request to the queue.

        Raises:
            RequestError: If the prompt is empty or too long, a token or adapter is unknown, or a number is out of range.
            QueueFullError: If the queue is full.
        """
        ...

    def abort(self, id: str) -> None:
        """End a request without further output and free its blocks.

        Unknown ids are ignored.
        """
        ...

    def step(self) -> Sequence[Output]:
        """Run one step and return its outputs.

        The list is empty if there is nothing to compute or no result is ready.

        If the runner fails, the engine drops all requests and raises the runner's error.
        """
        ...

    def busy(self) -> bool:
        """Return True if any request is waiting or running."""
        ...

    def statistics(self) -> Statistics:
        """Return the current `Statistics`."""
        ...

    def update_weights(self, weights: Any, version: int | None = None, *, share: bool = False) -> int:
        """Replace the weights, and return the number of bytes that were copied.

        Running requests continue with the new weights. New prompts do not reuse blocks that the old weights computed.

        Args:
            weights: An `axlearn_core.compose.ModelWeights` of the same model.
            version: Version of the new weights. The default is one more than the current version.
            share: See `Runner.update_weights`.
        """
        ...

    def close(self) -> None:
        """Free the devices and drop all requests."""
        ...


@attrs.frozen(kw_only=True)
class Row:
    """One request's part of a step.

    Attributes:
        slot: Index of the running request in the runner's tables, from 0 to `max_rows` - 1.
        tokens: Prompt tokens to compute, following those in the cache. Empty if the request decodes: the runner then uses
            the last token that it chose for the slot.
        start: Position of the first token.
        blocks: The request's blocks in order of position, including those that the step writes to.
        sample: Whether to choose the token after the last one.
        mask: Mask for the chosen token; see `Constraint.mask`.
        targets: The token after each of `tokens`, if their log-probabilities are requested. The target after the last prompt
            token is 0, and its log-probability is ignored.
        state: Row of the state pool to continue from, if it is not the slot's own row. See `KeepsStates`.
        snapshots: Rows of the pool in which to save the state, by position: a row holds the state after this number of tokens.
        verifies: Whether `tokens` after the first one are drafts, which `targets` contains too.
        following: Prompt token after the last one of `tokens`, if a later step computes it.
        embeddings: Embeddings of the first of `tokens`, [N, D], in place of the tokens' own; None if all have their own. See
            `TakesExtras`.
    """

    slot: int
    tokens: Sequence[int] = ()
    start: int
    blocks: Sequence[int]
    sample: bool = True
    mask: np.ndarray | None = None
    targets: Sequence[int] | None = None
    state: int | None = None
    snapshots: Mapping[int, int] = {}
    verifies: bool = False
    following: int | None = None
    embeddings: np.ndarray | None = attrs.field(default=None, eq=False)

    @property
    def is_single(self) -> bool:
        """True if the row computes one token that needs no place in a chunk."""
        return len(self.tokens) <= 1 and self.targets is None and self.embeddings is None


@attrs.frozen(kw_only=True)
class RowResult:
    """The result of a step for one `Row`.

    Attributes:
        tokens: Chosen tokens, one per step; empty if the row did not sample.
        logprobs: Log-probabilities of `tokens`, if the slot requests them.
        target_logprobs: Log-probabilities of the row's `targets`.
        drafts: Tokens that the model's heads draft after the last accepted token.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    target_logprobs: Sequence[TokenLogprobs] | None = None
    drafts: Sequence[int] = ()


class SubmittedStep(Protocol):
    """A step that was submitted to the devices."""

    def wait(self) -> Sequence[RowResult]:
        """Wait for the devices and return one result per row, in row order."""
        ...


class Runner(Protocol):
    """Computes a model's steps on devices.

    Steps use a cache of blocks and run in the order of `submit`.

    Attributes:
        vocab_size: Vocabulary size of the model.
        block_size: Positions per block.
        num_blocks: Number of blocks in the cache; block ids are 0 to `num_blocks` - 1.
        max_rows: Maximum number of running requests.
        max_batch_tokens: Maximum number of tokens in a step.
        max_prompt_tokens: Maximum number of prompt tokens in a step, in whole chunks.
        chunk: Number of prompt tokens that are computed together. A partial chunk costs as much as a full one, unless it is
            a single token.
        max_context: Maximum number of tokens in a request, including its output.
        max_logit_bias: Maximum number of tokens in a request's `logit_bias`.
        max_blocks_per_request: Maximum number of blocks per request.
        decode_steps: Maximum value of `steps` in `submit`.

    A runner may also implement `HasWindow`, `HasPrefix`, `KeepsStates`, `EmbedsTokens`, `TakesExtras`, `ReleasesMemory`,
    `ChangesAdapters`, `HasProgram` or `HoldsResources`.
    """

    vocab_size: int
    block_size: int
    num_blocks: int
    max_rows: int
    max_batch_tokens: int
    max_prompt_tokens: int
    chunk: int
    max_context: int
    max_logit_bias: int
    max_blocks_per_request: int
    decode_steps: int

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests can use."""
        ...

    @property
    def compilations(self) -> int:
        """Return the number of functions compiled since `warm_up` ended."""
        ...

    def warm_up(self) -> None:
        """Compile all functions that steps may need.

        Functions compiled earlier may be loaded on first use instead.
        """
        ...

    def assign(
        self,
        slot: int,
        sampling: Sampling,
        seed: int,
        output: Sequence[int],
        adapter: str | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """Assign a slot to a request.

        Args:
            slot: Slot index, from 0 to `max_rows` - 1.
            sampling: Sampling parameters of the request.
            seed: 32-bit seed. It is combined with the number of tokens chosen so far.
            output: Tokens chosen so far; not empty if the request was preempted.
            adapter: One of `adapters`; None uses the base model.
            prompt: Tokens of the prompt, for the repetition penalty.
        """
        ...

    def submit(self, rows: Sequence[Row], steps: int = 1) -> SubmittedStep:
        """Submit a step without waiting for it to finish.

        Args:
            rows: Rows with distinct slots: at most `max_rows` rows and `max_batch_tokens` tokens in total.
            steps: Number of tokens to choose for each row. Must be 1 unless all rows decode without a mask.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks before the next step. Each pair is (source, target)."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """Return the blocks' contents as a pytree of NumPy arrays."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Any) -> None:
        """Write contents that `read_blocks` returned, for a runner of the same model."""
        ...

    def update_weights(self, weights: Any, *, share: bool = False) -> int:
        """Replace the weights, and return the number of bytes that were copied.

        Args:
            weights: `axlearn_core.compose.ModelWeights` of the same model.
            share: Whether steps may read the given arrays themselves, if shape, dtype and sharding are those of the runner.
                If the caller donates or deletes them later, the next step raises `RequestError` until the weights are updated
                again. By default, all arrays are copied.

        Raises:
            RequestError: If the weights do not fit the model.
        """
        ...
