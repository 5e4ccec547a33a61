"""What the parts of a server agree on: requests in, tokens out.

A server (HTTP, a command, an evaluator) gives requests to an `Engine` and calls `step` in one thread. An engine decides which
tokens are computed next, and in which blocks of the cache; a `Runner` computes them on devices. Nothing here imports JAX.

Positions are counted from 0 at a request's first prompt token. A block is `block_size` consecutive positions of one request in
the cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np

from axlearn_core.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: the end token, a stop token, or the end of a constraint. `length`: `max_tokens`, or the context is full."""


class QueueFullError(RequestError):
    """The engine has as many waiting requests as it takes. `retry_after`: seconds after which it may have room."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


@attrs.frozen(kw_only=True)
class Sampling:
    """How tokens are chosen, in the order of the fields `logit_bias`, penalties, `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        max_tokens: at most this many; None until the context is full.
        temperature: 0 takes the likeliest token.
        top_k: draws from the `top_k` likeliest; None from all.
        top_p: draws from the fewest tokens with this probability together (Holtzman et al., 2020).
        min_p: draws from tokens with at least `min_p` times the highest probability (Nguyen et al., 2024).
        seed: equal seeds draw equal tokens regardless of what else is computed; None takes one at random.
        presence_penalty: taken from the logits of tokens that the output has.
        frequency_penalty: taken from them as often as the output has them.
        logit_bias: token -> what is added to its logit.
        stop_tokens: end the output, in addition to the tokenizer's end token; the token that ended it is not among the output's.
        ignore_end: goes on after the end token.
        logprobs: reports the log-probability of each output token, and of so many of the likeliest; None reports none.
            They are of the model's own distribution: before bias, penalties and temperature.
        prompt_logprobs: reports those of the prompt's tokens after the first too.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False


class Constraint(Protocol):
    """What the output must look like, such as a JSON schema. One per request; called between steps."""

    def mask(self) -> np.ndarray:
        """uint32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set where token i may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the token that was chosen; True where the output is complete."""
        ...


@runtime_checkable
class HasGrammar(Protocol):
    """A constraint that another process can make again.

    Attributes:
        grammar: all that the constraint is made from.
    """

    grammar: str


@attrs.frozen(kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among unfinished requests.
        prompt: token ids, at least one.
        priority: smaller goes first; equal ones in the order of arrival.
        client: whose it is. Waiting clients of one priority take turns.
        adapter: the name of a LoRA adapter; None takes the base model.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    priority: int = 0
    client: str = ""
    adapter: str | None = None


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: of the token that stands there, and of the likeliest, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Output:
    """What a step gave one request. The last one has `finish`.

    Attributes:
        id: of the request.
        tokens: the new ones.
        logprobs: one for each of `tokens`, where asked for.
        prompt_logprobs: of all prompt tokens after the first, in the first output, where asked for.
        finish: why it ended; None where it goes on.
        stop_token: the token that ended it.
        cached_tokens: how many tokens of the prompt were in the cache already.
        error: what went wrong, where `finish` is "error".
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None


@attrs.frozen(kw_only=True)
class Statistics:
    """An engine's state and its counters since it began.

    Attributes:
        waiting: requests in the queue.
        running: requests that have blocks.
        blocks: of the cache.
        used_blocks: of them those that requests hold.
        cached_blocks: of them those that no request holds and that have content for prompts to come.
        prompt_tokens: of requests that were begun.
        cached_prompt_tokens: of them those that were in the cache.
        output_tokens: chosen so far.
        preemptions: how often a request lost its blocks to another.
        steps: calls of the runner.
        compilations: since the warm-up ended; anything but 0 is a defect.
        step_seconds: in which the engine waited for its runner, or gave it a step.
        drafted_tokens: that were guessed.
        accepted_tokens: of them those that the model would have chosen.
        host_seconds: in which it planned steps and read results; the runner computes meanwhile.
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


class Engine(Protocol):
    """Continues many prompts at once. Methods are called from one thread.

    Attributes:
        vocab_size: token ids are 0 to `vocab_size` - 1.
        max_context: tokens of a prompt and its output together.

    An engine may also be a `PacesSteps`.
    """

    vocab_size: int
    max_context: int

    def add(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
            RequestError: it cannot be computed: an empty or too long prompt, an unknown token or adapter, a number out of range.
            QueueFullError: too many wait already.
        """
        ...

    def abort(self, id: str) -> None:
        """Ends a request and frees its blocks; an unknown one is none. No output follows."""
        ...

    def step(self) -> Sequence[Output]:
        """Computes what is next; empty where nothing waits or runs, or nothing is ready.

        Where the runner fails, all requests are dropped and its error is raised.
        """
        ...

    def busy(self) -> bool:
        """Whether a request waits or runs."""
        ...

    def statistics(self) -> Statistics:
        """See `Statistics`."""
        ...

    def update_weights(self, weights: Any) -> None:
        """Takes other weights of the same model (an `axlearn_core.compose.ModelWeights`); running requests go on with them.

        What the cache holds of earlier weights is not used for prompts to come.
        """
        ...

    def close(self) -> None:
        """Frees devices. Requests that wait or run are dropped."""
        ...


@attrs.frozen(kw_only=True)
class Row:
    """One request's part of a step.

    Attributes:
        slot: the request's place in the runner's tables, from 0 to `max_rows` - 1, while it runs.
        tokens: prompt tokens to compute, which follow what is in the cache. Empty where the request decodes: then the
            one token to compute is the one that was chosen last for this slot, which the runner still has.
        start: the position of the first of them.
        blocks: the request's blocks in the order of its positions; they have room for all positions that the step writes.
        sample: whether the token after the last one is chosen.
        mask: see `Constraint.mask`; for the token that is chosen.
        targets: the token after each of `tokens`, where their log-probabilities are asked for. After a prompt's last token
            it is 0, and its log-probability is not read.
    """

    slot: int
    tokens: Sequence[int] = ()
    start: int
    blocks: Sequence[int]
    sample: bool = True
    mask: np.ndarray | None = None
    targets: Sequence[int] | None = None


@attrs.frozen(kw_only=True)
class RowResult:
    """What a step computed for one `Row`.

    Attributes:
        tokens: those that were chosen, one per step; empty where the row did not sample.
        logprobs: of each of them, where the slot asked for them.
        target_logprobs: of each of the row's `targets`.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    target_logprobs: Sequence[TokenLogprobs] | None = None


class Pending(Protocol):
    """A step that was handed to the devices."""

    def wait(self) -> Sequence[RowResult]:
        """The results, one per row, in the order of the rows. Waits for the devices."""
        ...


@runtime_checkable
class HasConfig(Protocol):
    """A module that keeps the config that built it.

    Attributes:
        cfg: a `Node`.
    """

    cfg: Any


@runtime_checkable
class HasWindow(Protocol):
    """A runner of a model whose tokens see a limited number of keys. The engine uses the blocks behind them again.

    Attributes:
        window: keys that a token sees in any layer, itself included; None if a layer sees all.
    """

    window: int | None


@runtime_checkable
class HasProgram(Protocol):
    """A runner that computes by a program, whose structure weights in other forms are fitted to.

    Attributes:
        program: an `axlearn_core.compose.model_program.ModelProgram`.
    """

    program: Any


@runtime_checkable
class ReadsWeights(Protocol):
    """Weights that somebody opened and nobody has read yet, such as an `axlearn_core.run.RunWeights`."""

    def specs(self) -> Mapping[str, Any]:
        """Path -> shape and dtype of each tensor."""
        ...

    def read(self, pattern: str = "**") -> Mapping[str, Any]:
        """Path -> each tensor that fits the pattern."""
        ...


@runtime_checkable
class HoldsResources(Protocol):
    """A runner with something to release when its engine closes."""

    def close(self) -> None:
        """Releases it. Nothing is called afterwards."""
        ...


@runtime_checkable
class PacesSteps(Protocol):
    """An engine that can wait for more requests before it plans its next step."""

    def spare_seconds(self) -> float:
        """Seconds for which a call of `step` would only plan early, without the requests that arrive meanwhile."""
        ...


class Runner(Protocol):
    """Computes steps of one model on its devices, over a cache of blocks. Steps run in the order of `submit`.

    Attributes:
        vocab_size: of the model.
        block_size: positions of a block.
        num_blocks: of the cache; their ids are 0 to `num_blocks` - 1.
        max_rows: requests that run at one time.
        max_step_tokens: the most tokens of one step.
        max_prompt_tokens: of them the most in chunks of prompts.
        chunk: tokens of a prompt that are computed together; fewer take as long, but for a single one.
        max_context: tokens of a request, its output included.
        max_logit_bias: the most tokens in a request's `logit_bias`.
        max_blocks_per_request: the most blocks that one request can have.
        decode_steps: the largest `steps` of `submit`.
        adapters: names of LoRA adapters that requests may take.

    A runner may also be a `HasWindow`, `HasProgram` or `HoldsResources`.
    """

    vocab_size: int
    block_size: int
    num_blocks: int
    max_rows: int
    max_step_tokens: int
    max_prompt_tokens: int
    chunk: int
    max_context: int
    max_logit_bias: int
    max_blocks_per_request: int
    decode_steps: int
    adapters: tuple[str, ...]

    @property
    def compilations(self) -> int:
        """How many functions were compiled since `warm_up` ended."""
        ...

    def warm_up(self) -> None:
        """Compiles all functions that steps may need. What was compiled before may be loaded when it is needed."""
        ...

    def assign(
        self, slot: int, sampling: Sampling, seed: int, output: Sequence[int], adapter: str | None = None
    ) -> None:
        """Gives a slot to a request.

        Args:
            slot: from 0 to `max_rows` - 1.
            sampling: how its tokens are chosen.
            seed: 32 bits that its random numbers are derived from, together with the number of tokens chosen before.
            output: the tokens chosen before: of a request that was preempted.
            adapter: one of `adapters`; None takes the base.
        """
        ...

    def submit(self, rows: Sequence[Row], steps: int = 1) -> Pending:
        """Starts a step, and returns before it ends.

        Args:
            rows: of different slots, at most `max_rows`, with at most `max_step_tokens` tokens together.
            steps: how many tokens each row chooses, one after another; above 1 only where all rows decode without a mask.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, (source, target), before the next step."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """The contents of blocks, as a pytree of NumPy arrays: to be sent to another runner."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Any) -> None:
        """Puts contents from `read_blocks` of a runner of the same model into blocks."""
        ...

    def update_weights(self, weights: Any) -> None:
        """Takes other weights of the same model, an `axlearn_core.compose.ModelWeights`."""
        ...
