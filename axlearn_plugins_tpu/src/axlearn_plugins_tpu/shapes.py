"""Compute the shape of a TPU slice from its number of chips. Does not import JAX.

Slices of v4, v5p and 7x are three-dimensional: the shapes listed here for fewer than 64 chips, and boxes of 4 x 4 x 4 chips for 64
chips or more. Slices of v5e and v6e are two-dimensional. If several shapes are possible, the one closest to a cube is used, as in
Cloud TPU. Sources: cloud.google.com/tpu/docs/types-topologies, /v5e, /v5p, /v6e, /tpu7x.
"""

from collections.abc import Iterator

import attrs

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError

Shape = tuple[int, ...]

SMALL_BOXES: tuple[Shape, ...] = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
PLANES: tuple[Shape, ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


@attrs.frozen
class Slices:
    """Slice shapes of a TPU generation.

    Attributes:
        prefix: libtpu's name for the generation.
        small: Shapes that are not made of boxes of 4 x 4 x 4 chips, by size.
        boxes: Maximum number of chips in slices made of boxes of 4 x 4 x 4 chips; 0 if there are no such slices.
        accelerator: Cloud TPU's name for one accelerator type of the generation.
    """

    prefix: str
    small: tuple[Shape, ...]
    boxes: int
    accelerator: str


SLICES = {
    "tpu-v4": Slices("v4", SMALL_BOXES[1:], 4096, "v4-8"),
    "tpu-v5e": Slices("v5e", PLANES, 0, "v5litepod-4"),
    "tpu-v5p": Slices("v5p", SMALL_BOXES, 8960, "v5p-8"),
    "tpu-v6e": Slices("v6e", PLANES, 0, "v6e-4"),
    "tpu-7x": Slices("tpu7x", SMALL_BOXES, 9216, "tpu7x-8"),
}
"""Target name -> slice shapes."""


def find_shape(target: str, chips: int, unit: int = 1) -> Shape:
    """Return the shape of a slice with `chips` chips.

    Args:
        target: Key of `SLICES`.
        chips: Number of chips in one slice.
        unit: Units per chip in target names (2 if names count cores), for the error message.

    Raises:
        RequestError: If no slice has that many chips. The message lists the nearest sizes.
    """
    slices = SLICES[target]
    shapes = [s for s in _shapes(slices, chips) if _product(s) == chips]
    if shapes:
        return min(shapes, key=lambda s: (sum(s), s))
    sizes = sorted({_product(s) for s in slices.small} | set(range(64, slices.boxes + 1, 64)))
    sizes = [n for n in sizes if next(_shapes(slices, n), None)]
    below, above = [n for n in sizes if n < chips][-2:], [n for n in sizes if n > chips][:2]
    names = ", ".join(f"{target}-{n * unit}" for n in below + above)
    kind = f"multiples of 64 chips up to {slices.boxes:,}, or " if slices.boxes else ""
    raise RequestError(
        f"no slice of {target} has {chips:,} chips\n"
        f"    expected: {kind}{', '.join(str(_product(s)) for s in slices.small)} chips\n"
        f"    nearest: {names}\n"
        f"    fix: use one of these, or several slices ({target}-{sizes[-1] * unit}x2)"
    )


def domain_shape(machine: Machine) -> Shape:
    """Return the shape of one slice of a machine. Raise `RequestError` if no slice has that size."""
    target = machine.target
    unit = target.cores_per_chip if target.size == "cores" else 1
    return find_shape(target.name, machine.chips // machine.domains, unit)


def _shapes(slices: Slices, chips: int) -> Iterator[Shape]:
    """Yield the slice shapes of a TPU generation that have this number of chips."""
    yield from (s for s in slices.small if _product(s) == chips)
    if chips % 64 or chips > slices.boxes:
        return
    cubes = chips // 64
    for a in (n for n in range(1, cubes + 1) if cubes % n == 0):
        for b in (n for n in range(a, cubes // a + 1) if cubes // a % n == 0):
            c = cubes // a // b
            if c >= b and 4 * c <= MAX_SIDE:
                yield 4 * a, 4 * b, 4 * c


MAX_SIDE = 32
"""Maximum number of chips along one dimension of a box, from a pod of 8,192 chips (16 x 16 x 32)."""


def _product(shape: Shape) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
