"""Masks as the kernels of GPUs take them."""

from typing import Any, cast

from axlearn_plugins_transformer.kernels.masks import And, Causal, Full, Mask, SlidingWindow


def structure(mask: Mask, lengths: tuple[int, int], aligned: bool) -> tuple[bool, int | None, Mask | None]:
    """What kernels skip by themselves, and what is left.

    Args:
        mask: any.
        lengths: of queries and keys.
        aligned: whether a query and a key of one index are at one position.

    Returns:
        (whether it is causal, its window where it is causal, what has to be said for each pair or None).
    """
    if not aligned:
        return False, None, mask
    causal, rest = False, []
    window: int | None = None
    for part in mask.parts:
        if isinstance(part, Causal):
            causal = True
        elif isinstance(part, SlidingWindow):
            size: int = cast(Any, part).size
            window = size if window is None else min(window, size)
        elif not isinstance(part, Full):
            rest.append(part)
    if window is not None and not causal:
        rest.append(SlidingWindow(window))  # kernels know windows of causal attention only
        window = None
    if window is not None and window >= lengths[1]:
        window = None
    other_mask = None if not rest else rest[0] if len(rest) == 1 else And(tuple(rest))
    return causal, window, other_mask
