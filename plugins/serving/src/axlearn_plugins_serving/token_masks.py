"""Masks of the tokens that may come next: constraints, `min_tokens` and `bad_tokens`.

A mask is uint32 [ceil(V / 32)]; see `contracts.Constraint.mask`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from axlearn_plugins_serving.constraint_failure import ConstraintFailure, describe_failure
from axlearn_plugins_serving.contracts import Constraint, Sampling
from axlearn_plugins_serving.request_state import RequestState


def ending_tokens(sampling: Sampling, end_tokens: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a request's output.

    Args:
        sampling: Sampling parameters of the request.
        end_tokens: Tokens that end every output.
    """
    return sampling.stop_tokens if sampling.ignore_end else sampling.stop_tokens | end_tokens


def next_mask(state: RequestState, end_tokens: frozenset[int], vocab_size: int) -> np.ndarray | ConstraintFailure:
    """Return the mask for a request's next token, or why its constraint has none.

    A constraint takes precedence: if `min_tokens` and `bad_tokens` leave no token that it allows, only the constraint applies.

    Args:
        state: State of the request, which needs a mask.
        end_tokens: Tokens that end every output.
        vocab_size: Number of tokens in the vocabulary.
    """
    sampling, constraint = state.request.sampling, state.request.constraint
    mask = np.full((-(-vocab_size // 32),), 2**32 - 1, np.uint32)
    if constraint is not None:
        constrained = _constraint_mask(constraint, vocab_size)
        if isinstance(constrained, ConstraintFailure):
            return constrained
        mask = constrained
    banned = _completing_tokens(sampling.bad_tokens, state.output)
    if state.masks_end:
        banned |= ending_tokens(sampling, end_tokens)
    allowed = _without(mask, banned)
    return allowed if allowed.any() else mask


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


def _constraint_mask(constraint: Constraint, vocab_size: int) -> np.ndarray | ConstraintFailure:
    try:
        mask = constraint.mask()
    except Exception as error:  # constraints may raise anything; only this request fails
        return describe_failure(error)
    if mask.shape != (-(-vocab_size // 32),) or mask.dtype != np.uint32:
        expected = f"uint32[{-(-vocab_size // 32)}]"
        return ConstraintFailure(f"the constraint's mask is {mask.dtype}{list(mask.shape)}, expected {expected}")
    return mask if mask.any() else ConstraintFailure("the constraint allows no token")
