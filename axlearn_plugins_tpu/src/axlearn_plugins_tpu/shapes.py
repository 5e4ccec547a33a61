"""How the chips of a TPU slice are arranged, from their number. Imports no JAX.

Slices of v4, v5p and 7x are three-dimensional: below 64 chips the shapes that are listed here, from then on boxes of
4 x 4 x 4 chips. Those of v5e and v6e are two-dimensional. Of several shapes the one closest to a cube is taken, which is
Cloud TPU's default too. Sources: cloud.google.com/tpu/docs/types-topologies, /v5e, /v5p, /v6e, /tpu7x.
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
    """The slices that a TPU generation has.

    Attributes:
        prefix: what libtpu calls the generation.
        small: the shapes that are not boxes of 4 x 4 x 4 chips, by size.
        boxes: up to how many chips there are boxes of 4 x 4 x 4 chips; 0 where there are none.
        accelerator: what Cloud TPU calls one of its machines.
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
"""By the name of the target."""


def shape_of(target: str, chips: int, unit: int = 1) -> Shape:
    """The shape of a slice of `chips` chips.

    Args:
        target: a key of `SLICES`.
        chips: of one slice.
        unit: what a size counts per chip (2 where it counts cores), for the error.

    Raises:
        RequestError: no slice has that many chips; it names the nearest sizes.
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
        f"    fix: take one of those, or several slices ({target}-{sizes[-1] * unit}x2)"
    )


def domain_shape(machine: Machine) -> Shape:
    """The chips of one slice of a machine, along each dimension; raises `RequestError` if no slice has that size."""
    target = machine.target
    unit = target.cores_per_chip if target.size == "cores" else 1
    return shape_of(target.name, machine.chips // machine.domains, unit)


def _shapes(slices: Slices, chips: int) -> Iterator[Shape]:
    """The shapes that the generation has for a number of chips."""
    yield from (s for s in slices.small if _product(s) == chips)
    if chips % 64 or chips > slices.boxes:
        return
    cubes = chips // 64
    for a in (n for n in range(1, cubes + 1) if cubes % n == 0):
        for b in (n for n in range(a, cubes // a + 1) if cubes // a % n == 0):
            c = cubes // a // b
            if c >= b and 4 * c <= LONGEST:
                yield 4 * a, 4 * b, 4 * c


LONGEST = 32
"""Chips along one dimension of a box: those of a pod of 8,192 chips (16 x 16 x 32)."""


def _product(shape: Shape) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
