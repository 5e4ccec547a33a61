"""Values based on measurements: kernel priorities and layouts. Block sizes are in `kernels.blocks`. Does not import JAX.

Each entry names its source: a file with a measurement under `benchmarks/results/` of the repository, or `NOT_MEASURED`.
When a measurement changes a value, update its source too. A test checks that all sources exist.
"""

from collections.abc import Mapping

import attrs

from axlearn_core.contracts.mesh import Size

NOT_MEASURED = "not measured"
"""Source of a choice that is based on data sheets and reasoning, not on a measurement."""


@attrs.frozen
class Priority:
    """Priority of a kernel among the kernels of its op; the XLA reference has 0.

    Attributes:
        value: Priority. The kernel with the highest priority that supports a call is used; kernels with a negative priority
            must be named in a config.
        reason: Reason for the value until it is measured.
        source: Source of the value; see the module docstring.
    """

    value: int
    reason: str
    source: str = NOT_MEASURED


PRIORITIES: Mapping[tuple[str, str], Priority] = {
    ("attention", "cudnn"): Priority(50, "NVIDIA tunes it for each GPU"),
    ("attention", "tokamax-mosaic"): Priority(40, "covers calls on Hopper and Blackwell that cuDNN does not support"),
    ("attention", "tokamax-triton"): Priority(30, "covers calls that neither cuDNN nor Mosaic supports"),
    ("grouped_matmul", "tokamax-triton"): Priority(
        50, "its results are tested against the reference in the interpreter"
    ),
    ("grouped_matmul", "tokamax-mosaic"): Priority(
        40, "tested only by compiling it; tokamax itself prefers it to Triton"
    ),
    ("paged_attention", "pallas-triton"): Priority(
        50, "it needs a few launches; XLA's loops launch ten kernels for every block of keys"
    ),
    ("rms_norm", "tokamax-triton"): Priority(-1, "XLA fuses norms with the neighboring ops"),
    ("gated_linear_unit", "tokamax-triton"): Priority(-1, "XLA uses cuBLAS for both matmuls"),
    ("gated_linear_unit", "tokamax-mosaic"): Priority(-2, "tested only by compiling it"),
}
"""(op, kernel) -> priority."""


@attrs.frozen(kw_only=True)
class Layout:
    """Mesh layout for a range of model sizes, on every GPU.

    Attributes:
        parameters: Range [from, below) of the number of parameters.
        shape: Mesh shape.
        rules: Rules for logical axes, in addition to the defaults.
        source: Source of the value; see the module docstring.
    """

    parameters: tuple[float, float]
    shape: Mapping[str, Size]
    rules: Mapping[str, tuple[str, ...]] = {}
    source: str = NOT_MEASURED


LARGE = 40e9
"""Models with at least this many parameters split their layers over the GPUs of a host. With the batch spread over hundreds
of GPUs, gathering whole layers over the network would take longer than computing them."""

LAYOUTS = (
    Layout(parameters=(0, float("inf")), shape={"fsdp": -1}),
    Layout(
        parameters=(LARGE, 1e15),
        shape={"fsdp": -1, "tensor": "host"},
        rules={"activation_embed": ("tensor",)},
    ),
)
