"""Choices that measurements decide: priorities of kernels and layouts. Block sizes are in `kernels.blocks`. Imports no JAX.

Each choice names its source: the file under `benchmarks/results/` of the repository with the measurement that it follows, or
`NOT_MEASURED`. A value that a measurement changes is changed here, and its source with it; a test holds every source against the
files that there are.
"""

from collections.abc import Mapping

import attrs

from axlearn_core.contracts.mesh import Size

NOT_MEASURED = "not measured"
"""The source of a choice that follows from data sheets and reasoning: no measurement of it exists."""


@attrs.frozen
class Priority:
    """The rank of a kernel among those of its op; the XLA reference has 0.

    Attributes:
        value: the highest of those that support a call wins; below 0, a config has to name the kernel.
        reason: why this value, as long as nothing was measured.
        source: see the module.
    """

    value: int
    reason: str
    source: str = NOT_MEASURED


PRIORITIES: Mapping[tuple[str, str], Priority] = {
    ("attention", "cudnn"): Priority(50, "NVIDIA tunes it for each GPU"),
    ("attention", "tokamax-mosaic"): Priority(40, "serves what cuDNN does not, on Hopper and Blackwell"),
    ("attention", "tokamax-triton"): Priority(30, "serves what both do not"),
    ("grouped_matmul", "tokamax-triton"): Priority(
        50, "its results are compared with the reference in the interpreter"
    ),
    ("grouped_matmul", "tokamax-mosaic"): Priority(40, "compiled only; tokamax itself has it before Triton's"),
    ("paged_attention", "pallas-triton"): Priority(
        50, "a few launches, where XLA's loops launch ten kernels for every block of keys"
    ),
    ("rms_norm", "tokamax-triton"): Priority(-1, "XLA fuses norms with what is around them"),
    ("gated_linear_unit", "tokamax-triton"): Priority(-1, "XLA has cuBLAS for both products"),
    ("gated_linear_unit", "tokamax-mosaic"): Priority(-2, "compiled only"),
}
"""(op, kernel) -> its priority."""


@attrs.frozen(kw_only=True)
class Layout:
    """How models of some sizes are laid out on every GPU.

    Attributes:
        parameters: from and below how many.
        shape: of the mesh.
        rules: logical axes beside the default ones.
        source: see the module.
    """

    parameters: tuple[float, float]
    shape: Mapping[str, Size]
    rules: Mapping[str, tuple[str, ...]] = {}
    source: str = NOT_MEASURED


LARGE = 40e9
"""Parameters from which on the layers are split over the GPUs of a host: with the batch spread over hundreds of GPUs,
fetching whole layers over the network takes longer than computing with them."""

LAYOUTS = (
    Layout(parameters=(0, float("inf")), shape={"fsdp": -1}),
    Layout(
        parameters=(LARGE, 1e15),
        shape={"fsdp": -1, "tensor": "host"},
        rules={"activation_embed": ("tensor",)},
    ),
)
