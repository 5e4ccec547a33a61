"""`RunnerConfig`: the settings of a runner, which determine the shapes of its steps."""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import Problem
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_serving.text_embedding import EmbedBucket, Pooling, embed_buckets

R_co = TypeVar("R_co", covariant=True)


@node
class RunnerConfig(Configurable.Config[R_co]):
    """The sizes that determine the shapes of steps.

    Each step uses the smallest of these shapes that fits its rows.

    Attributes:
        block_size: Tokens per block.
        num_blocks: Number of blocks in the cache; None allocates enough for `max_rows` requests of `max_context` tokens.
        max_rows: Maximum number of running requests.
        max_context: Maximum number of tokens in a request, including its output. The default is 2,048, or the model's
            own context length if that is smaller.
        beyond_context: Whether to allow a longer context than the model's own, which makes RoPE extrapolate.
        max_step_tokens: Maximum number of prompt tokens in a step, rounded up to whole chunks.
        chunk: Prompt tokens computed as one row of a step. A prompt uses as many rows as it needs.
        row_buckets: Numbers of decoding requests to compile steps for; `max_rows` is always included.
        chunk_buckets: Numbers of chunks to compile steps for; the number for `max_step_tokens` is always included. Steps
            without decoding requests are compiled only for the smallest and the largest number.
        decode_steps: Maximum number of tokens to decode in one dispatch.
        mode: `fast`, or `parity` for results that match the training program in its batch-invariant mode bit for bit.
        layers: `separate` gives steps a weight per layer, in the layout that the processor reads fastest. `stacked` lets steps
            scan over the arrays of training, so that weights of a training program in the same process are not copied.
        cache_dtype: Storage dtype of cached keys and values, with a scale per token and head. None uses the model's dtype.
        adapters: Name -> directory written by `axlearn lora export`. Requests select an adapter by name.
        adapter_slots: Number of adapters that can be added later, in addition to `adapters`.
        adapter_rank: Largest rank of adapters that are added later.
        adapter_targets: Patterns of the paths of linear maps that adapters that are added later may change.
        kernel: Kernel for the `paged_attention` op; None picks the best kernel for the mode.
        num_snapshots: Number of recurrent states to keep for later requests, if the model has recurrent layers. None keeps two
            per running request.
        drafts: Whether each step drafts tokens with the model's heads. The `model-drafter` turns it on.
        pooling: Pooling of hidden states to embeddings: `mean`, `last` or `cls` (the first token). None uses the pooling of the
            model's files, and computes no embeddings if they have none. `off` turns embeddings off.
        extras: Whether requests may have other inputs of the model than tokens, such as the features of images. The model reads
            them in its `embed`, and a prompt's embeddings are computed at once, by a function that is compiled for each shape.
        kept_tokens: Maximum number of tokens to report with `sampling_logprobs` that top-k, top-p and min-p kept.
    """

    block_size: int = setting(default=32, ge=1)
    num_blocks: int | None = setting(default=None, ge=1)
    max_rows: int = setting(default=16, ge=1)
    max_context: int = setting(default=2048, ge=1)
    beyond_context: bool = False
    max_step_tokens: int = setting(default=512, ge=1)
    chunk: int = setting(default=32, ge=1)
    row_buckets: tuple[int, ...] = (1, 4)
    chunk_buckets: tuple[int, ...] = (1, 2, 4, 6, 8, 10, 12, 14)
    decode_steps: int = setting(default=1, ge=1)
    mode: Literal["fast", "parity"] = "fast"
    layers: Literal["separate", "stacked"] = "separate"
    cache_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    adapters: Mapping[str, str] = {}
    adapter_slots: int = setting(default=0, ge=0, le=256)
    adapter_rank: int = setting(default=16, ge=1)
    adapter_targets: tuple[str, ...] = ("**.attention.*",)
    kernel: str | None = None
    num_snapshots: int | None = setting(default=None, ge=0)
    drafts: bool = False
    pooling: Literal["mean", "last", "cls", "off"] | None = None
    extras: bool = False
    kept_tokens: int = setting(default=0, ge=0, le=2**14, hide_default=True)

    def validate(self) -> Iterable[Problem]:
        """Report invalid buckets, and caches that hold too many tokens."""
        yield from super().validate()
        most = 2**31 // max(1, self.block_size) - 1
        if self.total_blocks > most:
            yield Problem(
                path="num_blocks",
                message="a step counts cached tokens in 32 bits, so the cache has too many blocks",
                got=str(self.total_blocks),
                expected=f"at most {most}",
            )
        for name in ("row_buckets", "chunk_buckets"):
            if any(size < 1 for size in getattr(self, name)):
                yield Problem(
                    path=name,
                    message="bucket sizes must be positive",
                    got=str(getattr(self, name)),
                    expected="at least 1 each",
                )

    @property
    def blocks_per_request(self) -> int:
        """Maximum number of blocks per request."""
        return -(-self.max_context // max(1, self.block_size))

    @property
    def total_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self.num_blocks or self.max_rows * self.blocks_per_request

    @property
    def total_snapshots(self) -> int:
        """Number of recurrent states to keep for later requests."""
        return 2 * self.max_rows if self.num_snapshots is None else self.num_snapshots

    @property
    def embed_pooling(self) -> Pooling | None:
        """Pooling of embeddings, or None if the runner computes none."""
        return None if self.pooling == "off" else self.pooling

    @property
    def embed_buckets(self) -> list[EmbedBucket]:
        """The shapes of batches of texts to embed, in ascending order of length."""
        return [] if self.embed_pooling is None else embed_buckets(self.max_context, self.max_step_tokens)

    def buckets(self, *, states: bool = False) -> list[StepBucket]:
        """Return the shapes of steps, in ascending order. `states` is set for models with recurrent layers."""
        rows = sorted({min(n, self.max_rows) for n in (*self.row_buckets, self.max_rows)})
        most = -(-self.max_step_tokens // self.chunk)
        chunks = sorted({min(n, most) for n in (*self.chunk_buckets, most)})

        def bucket(rows: int, chunks: int) -> StepBucket:
            return StepBucket(rows, chunks, self.chunk, self.blocks_per_request, states)

        prompt_only = [bucket(0, k) for k in sorted({chunks[0], most})]
        return [*[bucket(n, 0) for n in rows], *prompt_only, *[bucket(rows[-1], k) for k in chunks]]
