"""What the router and its workers send one another, pickled, over a socket pair that nobody else has."""

from collections.abc import Sequence

import attrs

from axlearn_plugins_serving.contracts import Output, Request, Statistics
from axlearn_plugins_serving.disaggregated.handoff import Transfer


@attrs.frozen(kw_only=True)
class Ready:
    """From a worker: it takes requests.

    Attributes:
        vocab_size: of the model.
        max_context: tokens of a prompt and its output together.
        max_logit_bias: see `Runner`.
        adapters: that requests may name.
        blocks: of its cache.
        block_size: tokens of a block.
        max_rows: requests that run at one time.
    """

    vocab_size: int
    max_context: int
    max_logit_bias: int
    adapters: tuple[str, ...]
    blocks: int
    block_size: int
    max_rows: int


@attrs.frozen
class Failed:
    """From a worker: it cannot start, or its engine has failed. `request_wrong` where what it was started with is wrong."""

    message: str
    request_wrong: bool = False


@attrs.frozen
class Prefill:
    """To a worker: compute the prompt of a request."""

    request: Request


@attrs.frozen
class Prefilled:
    """From a worker: the prompt of a request is computed. `error` where it was refused."""

    id: str
    transfer: Transfer | None
    error: str | None = None


@attrs.frozen
class Decode:
    """To a worker: continue a request, whose prompt may be in a file and whose output may have to follow a grammar."""

    request: Request
    transfer: Transfer | None = None
    grammar: str | None = None


@attrs.frozen
class Abort:
    """To a worker: end a request."""

    id: str


@attrs.frozen
class Report:
    """From a worker: outputs, and now and then its counters."""

    outputs: Sequence[Output] = ()
    statistics: Statistics | None = None


@attrs.frozen
class Close:
    """To a worker: end."""
