"""The messages between the router and its workers.

They are pickled and sent over a private socket pair.
"""

from collections.abc import Sequence

import attrs

from axlearn_plugins_serving.contracts import Output, Request, Statistics
from axlearn_plugins_serving.disaggregated.handoff import Transfer


@attrs.frozen(kw_only=True)
class Ready:
    """From a worker: it is ready to accept requests.

    Attributes:
        vocab_size: Vocabulary size of the model.
        max_context: Maximum number of tokens in a prompt and its output.
        max_logit_bias: See `Runner`.
        adapters: Names of the adapters that requests can use.
        blocks: Number of blocks in the cache.
        block_size: Tokens per block.
        max_rows: Maximum number of running requests.
        compilations: Number of programs that XLA compiled during startup.
    """

    vocab_size: int
    max_context: int
    max_logit_bias: int
    adapters: tuple[str, ...]
    blocks: int
    block_size: int
    max_rows: int
    compilations: int


@attrs.frozen
class Failed:
    """From a worker: it cannot start, or its engine has failed.

    `request_wrong` is set if the worker's settings are invalid.
    """

    message: str
    request_wrong: bool = False


@attrs.frozen
class Prefill:
    """To a worker: compute the prompt of a request."""

    request: Request


@attrs.frozen
class Prefilled:
    """From a worker: the prompt of a request has been computed.

    `failure` is set if the request was rejected. `cached_tokens` is the number of prompt tokens that were already in the worker's
    cache.
    """

    id: str
    transfer: Transfer | None
    failure: Output | None = None
    cached_tokens: int = 0


@attrs.frozen
class Decode:
    """To a worker: continue a request.

    The prompt may be in a file, and a grammar may constrain the output.
    """

    request: Request
    transfer: Transfer | None = None
    grammar: str | None = None


@attrs.frozen
class Abort:
    """To a worker: end a request."""

    id: str


@attrs.frozen
class Report:
    """From a worker: new outputs, and, at regular intervals, the worker's statistics."""

    outputs: Sequence[Output] = ()
    statistics: Statistics | None = None


@attrs.frozen
class Close:
    """To a worker: exit."""
