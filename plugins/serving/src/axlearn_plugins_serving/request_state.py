"""The state of a request in an engine."""

from collections import deque

from axlearn_plugins_serving.blocks import Key, digest_extras
from axlearn_plugins_serving.contracts import Request, TokenLogprobs


class RequestState:
    """The state of a request, from `add` until it ends.

    The scheduler, the cache and the engine each write their own attributes.

    Attributes:
        request: The request as it was added.
        seed: Seed for its random numbers.
        arrival: Sequence number of the request.
        limit: Maximum number of output tokens.
        tokens: Prompt tokens, followed by the output tokens that have been read from the runner.
        target: Number of `tokens` to compute before the request decodes. Set when it starts.
        computed: Positions covered by submitted steps.
        inflight: Number of tokens that submitted steps choose and that have not been read yet.
        slot: Slot in the runner's tables; None while the request waits.
        blocks: Blocks of the cache, in order of position.
        freed: Number of leading `blocks` that were released because no later token attends to them.
        keys: Keys of the full blocks in `tokens` that have been computed so far.
        key_version: Version of the weights that `keys` belong to.
        announced: Keys of blocks that the request is computing. The last key may be for a partial block.
        restored: Row with the recurrent state from which the next step continues; None if it continues from the slot's state.
        saved: (position, row) of the recurrent states that submitted steps save and that have no key yet.
        branch: Number of leading blocks that were cached when the request started, whether or not their state was.
        output_state: Key of the state saved for the output, which the next one replaces.
        stored: Number of `blocks` whose content is registered in the cache.
        shares: Whether other requests may use its blocks. False after the weights change.
        cached_tokens: Number of prompt tokens that were in the cache when the request started; None before it starts.
        started: Time at which it left the queue for the first time, from `time.monotonic`; None before.
        prompt_logprobs: Log-probabilities of prompt tokens that have been read so far.
        drafts: Tokens that the model's heads drafted after the last token.
        resends_token: Whether the next step contains the last token, because the runner's last token may follow a rejected draft.
        places: n-gram -> index after its last token, for a drafter.
        indexed: Number of `tokens` that are in `places`.
        sent_prompt_logprobs: Whether `prompt_logprobs` have been returned.
        extras_digest: Hash of the extras of the prompt. Empty if it has none.
        finished: Whether the request has ended; later results are ignored.
    """

    __slots__ = (
        "announced", "arrival", "blocks", "branch", "cached_tokens", "computed", "drafts", "extras_digest",
        "finished", "freed", "indexed", "inflight", "key_version", "keys", "limit", "output_state", "places",
        "prompt_length", "prompt_logprobs", "request", "resends_token", "restored", "saved", "seed", "sent_prompt_logprobs",
        "shares", "slot", "started", "stored", "target", "tokens",
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
        self.restored: int | None = None
        self.saved: deque[tuple[int, int]] = deque()
        self.branch = 0
        self.output_state: Key | None = None
        self.shares = True
        self.cached_tokens: int | None = None
        self.started: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.sent_prompt_logprobs = not request.sampling.scores_prompt
        self.places: dict[tuple[int, ...], int] = {}
        self.indexed = 0
        self.resends_token = False
        self.drafts: tuple[int, ...] = ()
        self.extras_digest = digest_extras(request.extras)
        self.finished = False

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: smaller values start first and lose their blocks last."""
        return self.request.priority, self.arrival

    @property
    def decodes(self) -> bool:
        """Whether the next token to compute is the token that was chosen last."""
        return self.computed >= self.target

    @property
    def remaining(self) -> int:
        """The number of tokens still to choose, excluding those in flight."""
        return self.limit - self.inflight - (len(self.tokens) - self.prompt_length)

    @property
    def masks_end(self) -> bool:
        """True if the next token must not end the output."""
        num_chosen = len(self.tokens) - self.prompt_length + self.inflight
        return num_chosen < self.request.sampling.min_tokens

    @property
    def needs_mask(self) -> bool:
        """True if a mask applies to the next token."""
        return self.request.constraint is not None or bool(self.request.sampling.bad_tokens) or self.masks_end

    @property
    def mask_needs_output(self) -> bool:
        """True if the mask of the next token depends on the tokens in flight."""
        return self.request.constraint is not None or any(len(word) > 1 for word in self.request.sampling.bad_tokens)

    @property
    def output(self) -> list[int]:
        """The output tokens that have been read so far."""
        return self.tokens[self.prompt_length :]
