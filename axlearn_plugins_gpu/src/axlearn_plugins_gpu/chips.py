"""What compilers and kernels have to know of each GPU. Imports no JAX."""

import attrs


@attrs.frozen(kw_only=True)
class Chip:
    """The processor of a GPU.

    Sources: NVIDIA's tuning guides for Ampere, Hopper and Blackwell, and what the driver reports.

    Attributes:
        capability: CUDA compute capability, (major, minor).
        accelerated: whether it has instructions that later GPUs lack (`sm_90a`).
        cores: streaming multiprocessors.
        fpus: float32 units of each.
        clock: GHz.
        shared: bytes of shared memory of a multiprocessor; a block can have all but 1 KiB.
        l2: bytes of the second-level cache.
    """

    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus: int
    clock: float
    shared: int
    l2: int


_HOPPER = {"capability": (9, 0), "accelerated": True, "cores": 132, "fpus": 128, "clock": 1.98, "shared": 228 * 1024}

CHIPS: dict[str, Chip] = {
    "a100": Chip(capability=(8, 0), accelerated=False, cores=108, fpus=64, clock=1.41, shared=164 * 1024, l2=40 << 20),
    "h100": Chip(**_HOPPER, l2=50 << 20),
    "h200": Chip(**_HOPPER, l2=60 << 20),
    "b200": Chip(
        capability=(10, 0), accelerated=True, cores=148, fpus=128, clock=1.965, shared=228 * 1024, l2=132_644_864
    ),
}


def unknown_gpu(target: str) -> str | None:
    """Why a kernel cannot say whether it runs there; None where the GPU is known."""
    names = ", ".join(CHIPS)
    return None if target in CHIPS else f"the GPU {target or 'here'!r} is none that it is known to run on ({names})"
