"""Hardware facts of each GPU for compilers and kernels. Does not import JAX."""

import attrs


@attrs.frozen(kw_only=True)
class Chip:
    """The processor of a GPU.

    Sources: NVIDIA's tuning guides for Ampere, Hopper and Blackwell, and what the driver reports.

    Attributes:
        capability: CUDA compute capability, (major, minor).
        accelerated: Whether the GPU has instructions that later GPUs lack (`sm_90a`).
        cores: Number of streaming multiprocessors.
        fpus: Number of float32 units per multiprocessor.
        clock: Clock rate, in GHz.
        shared: Bytes of shared memory per multiprocessor. A block can use all but 1 KiB.
        l2: Bytes of L2 cache.
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
    """Return why a kernel cannot tell whether it supports the GPU, or None if the GPU is known."""
    names = ", ".join(CHIPS)
    return None if target in CHIPS else f"it is not known to run on GPU {target or 'unknown'!r} (known GPUs: {names})"
