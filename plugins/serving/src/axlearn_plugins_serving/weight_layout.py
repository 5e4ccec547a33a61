"""How a runner stores the weights of linear maps, and how many rows it multiplies them with at least."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from flax import nnx

from axlearn_core.config import Node, find
from axlearn_core.nn.linear import Linear

SLOW_TRANSPOSED = ("AuthenticAMD",)
"""Vendors of processors on which XLA multiplies 16 rows faster with [inputs, outputs]: measured on a Xeon and an EPYC of 2022."""

LEAST_ROWS, LEAST_ROWS_OF_ODD_MAPS = 32, 64
"""Rows that XLA for CPU computes as it computes any larger number, bit for bit: of models all of whose maps have outputs in whole
multiples of `EVEN` and at least `WIDE`, and of others. It multiplies fewer rows, and sums fewer than 4,096 numbers, by other
algorithms. Measured from 16 to 512 rows on an EPYC; `tests/plugins/serving/test_parity.py` holds it wherever it runs."""
EVEN, WIDE = 64, 128


def least_rows(model: Any) -> int:
    """Of every product of a model in the mode `parity`; `model` is a `CausalLM`, with abstract arrays or with its weights."""
    maps = [module for _, module in nnx.iter_modules(model) if isinstance(module, Linear)]
    outputs = [math.prod(module.cfg.output_dims) for module in maps] + [model.vocab_size]
    return LEAST_ROWS if all(n % EVEN == 0 and n >= WIDE for n in outputs) else LEAST_ROWS_OF_ODD_MAPS


def stores_transposed(model: Node[Any], devices: Sequence[Any]) -> bool:
    """Whether the maps of a model are stored as [outputs, inputs]: on one CPU, where nothing but the map reads its weight."""
    if len(devices) > 1 or devices[0].platform != "cpu" or processor_vendor() in SLOW_TRANSPOSED:
        return False
    return not any("latent_cache" in {a.name for a in attrs.fields(type(n))} for n in find(model, Node).values())


@functools.cache
def processor_vendor() -> str:
    """What the processor calls its vendor; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")
