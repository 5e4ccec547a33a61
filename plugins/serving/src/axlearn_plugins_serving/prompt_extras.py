"""Prompts with extras: other inputs of the model than tokens, such as the features of images.

The embeddings of a whole prompt are computed at once. Steps then read them in chunks, in place of the embeddings of the tokens.
Layers do not get the extras, so a model whose layers read them cannot be served with extras.

Legend: S tokens of a prompt with padding, D width, K chunks of C tokens.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Array, Function
from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Context
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_transformer.causal_lm import EmbedsTokens, splits_decoder
from axlearn_plugins_transformer.extras import ExtrasError, Shapes, check_used, extra_shapes, find_used
from axlearn_plugins_transformer.functions import Arrays, GenerationFunctions

SHORTEST = 16
"""Prompts are padded to at least this length and to a power of two, so that few lengths are compiled."""
MAX_SHAPES = 256
"""Maximum number of shapes that an engine compiles. They stay in memory."""
PROMPT_FUNCTION = "serve_prompt"
"""Name of the function that computes the embeddings of a prompt."""


class ChunkEmbeddings(NamedTuple):
    """Embeddings for the chunks of a step.

    Attributes:
        values: Embeddings, [K C, D].
        replaces: Whether the embedding replaces that of the token, bool [K C].
    """

    values: Any
    replaces: Any

    def replace(self, embeddings: jax.Array, rows: int) -> jax.Array:
        """Replace embeddings of the tokens of a step, [T, 1, D]. The first `rows` tokens, and the padding, keep theirs."""
        end = rows + self.replaces.shape[0]
        chunks = jnp.where(self.replaces[:, None, None], self.values[:, None], embeddings[rows:end])
        return embeddings.at[rows:end].set(chunks)


@attrs.frozen
class PromptBucket:
    """The shapes of a prompt.

    Attributes:
        length: S.
        extras: Names, shapes and dtypes of the extras.
    """

    length: int
    extras: Shapes

    @classmethod
    def fit(cls, count: int, extras: Mapping[str, np.ndarray]) -> "PromptBucket":
        """Return the shapes for a prompt of `count` tokens."""
        return cls(max(SHORTEST, 1 << (count - 1).bit_length()), extra_shapes(extras))


class PromptFunctions:
    """The function that computes the embeddings of a prompt with extras."""

    def __init__(self, functions: GenerationFunctions):
        """Check that steps of the model can read embeddings.

        Raises:
            RequestError: If they cannot.
        """
        self._bind, self._specs = functions.bind, functions.specs
        model = self._bind(self._specs)
        if not (splits_decoder(model) and isinstance(model.decoder, EmbedsTokens)):
            raise RequestError(
                f"a {type(model).__name__} cannot be served with extras, because its decoder reads no embeddings, or the model "
                "replaces `hidden_states`\n"
                "    got: serving.runner.extras=true\n    expected: a subclass of `CausalLM` that reads its extras in `embed`\n"
                "    fix: set serving.runner.extras=false"
            )
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        embed = lambda arrays, tokens: self._bind(arrays).embed({"tokens": tokens})  # noqa: E731
        try:
            spec = jax.eval_shape(embed, self._specs, token)
        except Exception as error:  # such as a key that is missing
            raise RequestError(
                f"the model cannot be served, because its `embed` fails without extras: {type(error).__name__}: {error}\n"
                "    expected: embeddings of tokens alone, because decoding steps offer no extras\n    fix: change the model"
            ) from error
        self.embedding = jax.ShapeDtypeStruct(spec.shape[2:], spec.dtype)

    def declare(self, weights: Mapping[str, Array]) -> Mapping[str, Function]:
        """Return the function by name."""
        return {
            PROMPT_FUNCTION: Function(
                call=self.embed,
                inputs=lambda bucket: (weights, *self._inputs(bucket)),
                takes_model=False,
                takes_bucket=True,
                describe="compute the embeddings of a prompt with extras",
            )
        }

    def chunk_embeddings(self, bucket: StepBucket) -> ChunkEmbeddings | None:
        """Return the embeddings that a step takes, abstract. None for steps without chunks."""
        count = bucket.chunks * bucket.chunk
        if not count:
            return None
        return ChunkEmbeddings(Array((count, *self.embedding.shape), self.embedding.dtype), Array((count,), jnp.bool_))

    def embed(self, arrays: Arrays, tokens: jax.Array, extras: Arrays, bucket: PromptBucket) -> jax.Array:
        """Return the embeddings of a prompt, int32 [1, S] -> [S, D]."""
        del bucket
        return self._bind(arrays).embed({"tokens": tokens, **extras})[0]

    def check(self, bucket: PromptBucket) -> None:
        """Check that the embeddings depend on each extra of a prompt, and the layers on none.

        Raises:
            ExtrasError: If `embed` fails, if an extra has no effect, or if the layers read it.
        """
        tokens, extras = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._inputs(bucket))
        embed = functools.partial(self.embed, bucket=bucket)
        values = jax.ShapeDtypeStruct((1, bucket.length, *self.embedding.shape), self.embedding.dtype)
        try:
            traced = jax.make_jaxpr(embed)(self._specs, tokens, extras)
            in_layers = jax.make_jaxpr(self._run_layers)(self._specs, tokens, values, extras)
        except Exception as error:  # any line of the model may fail for such arrays
            got = ", ".join(f"{name} {dtype} {list(shape)}" for name, shape, dtype in bucket.extras)
            raise ExtrasError(
                f"the model cannot read these extras: {str(error).splitlines()[0] if str(error) else type(error).__name__}\n"
                f"    got: {got}\n    expected: the shapes and dtypes that its `embed` reads\n    fix: correct the extras"
            ) from error
        (result,) = traced.out_avals
        if (result.shape, result.dtype) != (values.shape[1:], values.dtype):
            raise ExtrasError(
                "with extras, the model's `embed` does not return an embedding for each token\n"
                f"    got: {result.dtype} [1, {', '.join(map(str, result.shape))}]\n"
                f"    expected: {values.dtype} {list(values.shape)}, as without extras\n    fix: change the model"
            )
        embedded = find_used(traced.jaxpr, (self._specs, tokens), extras)
        read = find_used(in_layers.jaxpr, (self._specs, tokens, values), extras)
        check_used(extras, [name for name in extras if name in {*embedded, *read}])
        for name in read:
            raise ExtrasError(
                f"the layers of the model read extras[{name!r}], which serving offers only to `embed`\n"
                "    expected: extras that change nothing but the embeddings of the prompt\n"
                "    fix: use `generate`, or read it in the model's `embed`"
            )

    def _run_layers(self, arrays: Arrays, tokens: jax.Array, values: jax.Array, extras: Arrays) -> jax.Array:
        """Return the hidden states of a prompt whose embeddings are given."""
        model = self._bind(arrays)
        inputs, context, options = model.decoder_inputs({"tokens": tokens, **extras}, Context(extras=extras))
        return model.decoder(inputs, context, None, **{**options, "embeddings": values})[0]

    @staticmethod
    def _inputs(bucket: PromptBucket) -> tuple[Any, dict[str, Array]]:
        extras = {name: Array(shape, jnp.dtype(dtype)) for name, shape, dtype in bucket.extras}
        return Array((1, bucket.length), jnp.int32), extras


def pack_embeddings(chunks: ChunkEmbeddings, begin: int, embeddings: np.ndarray) -> None:
    """Write embeddings of consecutive tokens, [N, D], into those of a step, from token `begin` of its chunks on."""
    end = begin + len(embeddings)
    chunks.values[begin:end] = embeddings
    chunks.replaces[begin:end] = True


def pad_tokens(tokens: Sequence[int], length: int) -> np.ndarray:
    """Return the tokens of a prompt with padding, int32 [1, S]."""
    return np.asarray([[*tokens, *[0] * (length - len(tokens))]], np.int32)
