"""Masks of the tokens that may come next: constraints, `min_tokens` and `bad_tokens`.

A mask is uint32 [ceil(V / 32)]; see `contracts.Constraint.mask`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from axlearn_plugins_serving.contracts import Constraint, Sampling
from axlearn_plugins_serving.request_state import RequestState


def ending_tokens(sampling: Sampling, end_tokens: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a request's output.

    Args:
        sampling: Sampling parameters of the request.
        end_tokens: Tokens that end every output.
    """
    return sampling.stop_tokens if sampling.ignore_end else sampling.stop_tokens | end_tokens


def next_mask(state: RequestState, end_tokens: frozenset[int], vocab_size: int) -> tuple[np.ndarray | None, str | None]:
    """Return the mask for a request's next token, or None and an error message.

    A constraint takes precedence: if `min_tokens` and `bad_tokens` leave no token that it allows, only the constraint applies.

    Args:
        state: State of the request, which needs a mask.
        end_tokens: Tokens that end every output.
        vocab_size: Number of tokens in the vocabulary.
    """
    sampling, constraint = state.request.sampling, state.request.constraint
    mask = np.full((-(-vocab_size // 32),), 2**32 - 1, np.uint32)
    if constraint is not None:
        constrained, problem = _constraint_mask(constraint, vocab_size)
        if constrained is None:
            return None, problem
        mask = constrained
    banned = _completing_tokens(sampling.bad_tokens, state.output)
    if state.masks_end:
        banned |= ending_tokens(sampling, end_tokens)
    allowed = _without(mask, banned)
    return (allowed if allowed.any() else mask), None


def _completing_tokens(sequences: Iterable[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Return the last token of each sequence whose other tokens end the output."""
    return {
        tokens[-1]
        for tokens in sequences
        if len(tokens) <= len(output) + 1 and list(tokens[:-1]) == list(output[len(output) + 1 - len(tokens) :])
    }


def _without(mask: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """Return a mask without some of its tokens."""
    ids = np.fromiter(tokens, np.int64)
    if not ids.size:
        return mask
    mask = mask.copy()
    np.bitwise_and.at(mask, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return mask


def _constraint_mask(constraint: Constraint, vocab_size: int) -> tuple[np.ndarray | None, str | None]:
    """Return the mask of a constraint, or None and an error message."""
    try:
        mask = constraint.mask()
    except Exception as error:  # constraints may raise anything; only this request fails
        return None, f"the constraint failed: {error}"
    if mask.shape != (-(-vocab_size // 32),) or mask.dtype != np.uint32:
        return None, f"the constraint's mask is {mask.dtype}{list(mask.shape)}, expected uint32[{-(-vocab_size // 32)}]"
    if not mask.any():
        return None, "the constraint allows no token"
    return mask, None
