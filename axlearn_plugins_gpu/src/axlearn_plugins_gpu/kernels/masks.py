"""Convert masks into the arguments of GPU kernels."""

from typing import Any, cast

from axlearn_plugins_transformer.kernels.masks import And, Causal, Full, Mask, SlidingWindow


def split_mask(mask: Mask, lengths: tuple[int, int], aligned: bool) -> tuple[bool, int | None, Mask | None]:
    """Split a mask into the parts that kernels support and the remainder.

    Args:
        mask: Mask to split.
        lengths: Number of queries and of keys.
        aligned: Whether queries and keys with equal indices are at equal positions.

    Returns:
        (whether the mask is causal, the window of a causal mask or None, the remaining mask or None).
    """
    if not aligned:
        return False, None, mask
    causal, other_parts = False, []
    window: int | None = None
    for part in mask.parts:
        if isinstance(part, Causal):
            causal = True
        elif isinstance(part, SlidingWindow):
            size: int = cast(Any, part).size
            window = size if window is None else min(window, size)
        elif not isinstance(part, Full):
            other_parts.append(part)
    if window is not None and not causal:
        other_parts.append(SlidingWindow(window))  # kernels support windows only in causal attention
        window = None
    if window is not None and window >= lengths[1]:
        window = None
    other_mask = None if not other_parts else other_parts[0] if len(other_parts) == 1 else And(tuple(other_parts))
    return causal, window, other_mask
