"""What an engine knows of one request while it waits and runs."""

from collections import deque

from axlearn_plugins_serving.blocks import Key
from axlearn_plugins_serving.contracts import Request, TokenLogprobs


class RequestState:
    """A request between `add` and its end. The scheduler, the cache and the engine each write their own attributes.

    Attributes:
        request: as it was added.
        seed: what its random numbers come from.
        arrival: counts requests.
        limit: how many tokens its output can have.
        tokens: of the prompt, and of the output as far as it was read from the runner.
        target: so many of `tokens` are computed by their ids; after them the request decodes. Set when it begins.
        computed: positions that steps were submitted for.
        inflight: tokens that submitted steps choose, and that were not read yet.
        slot: in the runner's tables; None while it waits.
        blocks: of the cache, in the order of positions.
        freed: how many of the first `blocks` were given back: no later token sees them.
        keys: of the full blocks of `tokens`, as far as they were computed.
        key_version: of the weights that `keys` are for.
        announced: keys of blocks that it has begun and not yet computed; the last may be that of a block that is not full.
        stored: how many of `blocks` the cache knows the content of.
        shares: whether other requests may use its blocks: not after a change of the weights.
        cached_tokens: of the prompt, found in the cache when it began; None before.
        prompt_logprobs: as far as they were read.
        places: sequences of tokens -> where the last of them ends, for a drafter.
        indexed: how many of `tokens` are in `places`.
        sent_prompt_logprobs: whether they were given out.
        finished: no result is for it any more.
    """

    __slots__ = (
        "announced", "arrival", "blocks", "cached_tokens", "computed", "finished", "freed", "indexed",
        "inflight", "key_version", "keys", "limit", "places", "prompt_length", "prompt_logprobs", "request", "seed",
        "sent_prompt_logprobs", "shares", "slot", "stored", "target", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, *, seed: int, arrival: int, limit: int):
        self.request, self.seed, self.arrival, self.limit = request, seed, arrival, limit
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.target = self.computed = self.inflight = self.stored = self.freed = 0
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.keys: list[Key] = []
        self.key_version = -1
        self.announced: deque[Key] = deque()
        self.shares = True
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.sent_prompt_logprobs = not request.sampling.prompt_logprobs
        self.places: dict[tuple[int, ...], int] = {}
        self.indexed = 0
        self.finished = False

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first, and loses its blocks last."""
        return self.request.priority, self.arrival

    @property
    def decodes(self) -> bool:
        """Whether the next token to compute is the one that was chosen last."""
        return self.computed >= self.target

    @property
    def remaining(self) -> int:
        """How many tokens are still to be chosen, in addition to those in flight."""
        return self.limit - self.inflight - (len(self.tokens) - self.prompt_length)

    @property
    def output(self) -> list[int]:
        """The tokens of the output as far as they were read."""
        return self.tokens[self.prompt_length :]
