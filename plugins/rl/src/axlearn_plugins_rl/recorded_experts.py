"""The recorded experts of trajectories. This module does not import JAX."""

from collections.abc import Sequence

import attrs
import numpy as np

from axlearn_plugins_rl.rollout_contracts import Completion, Segment, Trajectory


def join_completion(context: Sequence[Segment], completion: Completion) -> Trajectory:
    """Return the trajectory of a context and its completion.

    If the completion has recorded experts, segments of the context get those of their tokens, unless an earlier completion has
    recorded them.

    Args:
        context: Segments of the context.
        completion: The completion.
    """
    if completion.context_experts is None:
        return (*context, completion.segment)
    segments, begin = [], 0
    for segment in context:
        experts = completion.context_experts[begin : begin + len(segment.tokens)]
        if segment.experts is not None:
            experts = np.where(segment.experts >= 0, segment.experts, experts)
        segments.append(attrs.evolve(segment, experts=experts))
        begin += len(segment.tokens)
    return (*segments, completion.segment)


def split_experts(recorded: np.ndarray | None, context: int, drawn: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Split the record of an engine into the experts of a context and of the tokens drawn after it.

    Args:
        recorded: Experts of all tokens that the engine has read, int16 [T, L, K], or None.
        context: Number of tokens of the context.
        drawn: Number of drawn tokens. The engine has not read the last one.

    Returns:
        int16 [context, L, K] and [drawn, L, K], with -1 for tokens without a record. None if there is no record.
    """
    if recorded is None:
        return None, None
    missing = context + drawn - len(recorded)
    experts = np.pad(recorded, ((0, missing), (0, 0), (0, 0)), constant_values=-1)
    return experts[:context], experts[context:]
