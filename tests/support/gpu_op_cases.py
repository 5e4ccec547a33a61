"""Calls of ops at sizes that GPU kernels support, and their comparison with the reference.

Used by these tests, and by the benchmark that runs the same calls on a GPU.
"""

import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.kernels import selection
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Prefix, Segments, SlidingWindow
from axlearn_plugins_transformer.kernels.paged_attention import Split
from axlearn_testing import Case, KernelSuite
from support import op_cases as conformance

OPS = {op.name: op for op in conformance.CASES}
"""Op name -> class."""
TOLERANCE = 3e-2
"""Tolerance of 16-bit results, relative to the norm of each array."""


def attend(kernel, query, key, value, mask, **options):
    return AttentionOp(query, key, value, mask=mask, scale=query.shape[-1] ** -0.5, **options).run(kernel)


def attention_cases(size, length, rng):
    """Yield cases with different masks and groups, for heads of one size."""
    ids = jnp.asarray(np.sort(rng.integers(1, 5, (2, length)), axis=1), jnp.int32)
    prefix = jnp.asarray([3, length // 2 + 12], jnp.int32)
    for name, mask, groups, softcap in (
        ("causal", Causal(), 2, None),
        ("full", Full(), 1, None),
        ("window", Causal() & SlidingWindow(100), 2, None),
        ("packed", Causal() & SlidingWindow(70) & Segments(ids, ids), 4, None),
        ("prefix", (Causal() | Prefix(prefix)) & Segments(ids, ids), 2, None),
        ("softcap", Causal(), 2, 20.0),
    ):
        heads = (4, groups, groups)
        operands = [jnp.asarray(rng.normal(size=(2, length, n, size)), "bfloat16") for n in heads]
        run = functools.partial(attend, softcap=softcap)
        yield Case(name=f"{name}-{size}x{length}", run=run, operands=(*operands, mask), tolerance=TOLERANCE)


def grouped_cases(rng):
    """Yield even and uneven groups, some of them empty, with rows after the last group."""
    for rows, inner, outer, sizes in ((512, 256, 512, (128,) * 4), (512, 512, 256, (300, 0, 7, 105))):
        lhs = jnp.asarray(rng.normal(size=(rows, inner)), "bfloat16")
        rhs = jnp.asarray(rng.normal(size=(len(sizes), inner, outer)) / 16, "bfloat16")
        operands = (lhs, rhs, jnp.asarray(sizes, jnp.int32))
        name = f"{rows}x{inner}x{outer}-{len(sizes)}"
        yield Case(name=name, run=conformance.grouped, operands=operands, tolerance=TOLERANCE)


def gated_cases(rng, width, hidden):
    """Activations that kernels have."""
    for activation in ("silu", "relu_squared"):
        x = jnp.asarray(rng.normal(size=(2, 128, width)), "bfloat16")
        matrices = [jnp.asarray(rng.normal(size=(width, hidden)) / width**0.5, "bfloat16") for _ in "gu"]

        def run(kernel, x, gate, up, activation=activation):
            return conformance.gated(kernel, x, gate, up, activation=activation)

        yield Case(name=f"{activation}-{width}x{hidden}", run=run, operands=(x, *matrices), tolerance=TOLERANCE)


def paged_cases(rng):
    """Yield decoding requests and chunks of prompts, with finite pages."""
    singles, chunks, chunk = 16, 4, 32
    lengths = [*rng.integers(1, 1500, singles), *(chunk + rng.integers(0, 1400, chunks))]
    new = [1] * singles + [chunk] * chunks
    options = {"new": new, "lengths": [int(n) for n in lengths], "slots": 32, "dtype": "bfloat16", "finite": True}
    options |= {"heads": 32, "split": Split(singles, chunk), "tokens": chunk}  # tokens for an unused request
    for size, groups, window, softcap in ((128, 8, None, None), (128, 32, 300, None), (256, 8, None, 20.0)):
        name, mask = (
            f"serving-{groups}x{size}-{window}",
            Causal() if window is None else Causal() & SlidingWindow(window),
        )
        yield conformance.paged(name, **options, groups=groups, size=size, mask=mask, softcap=softcap)
    # A block with fewer keys than a tensor core instruction needs.
    short = {"new": [1, 1], "lengths": [7, 3], "slots": 8, "size": 64, "dtype": "bfloat16", "finite": True, "tokens": 1}
    yield conformance.paged("short", **short, split=Split(3, 1))


def cases_of(op, *, small):
    """Yield the cases of an op; `small` selects sizes for the interpreter."""
    rng = np.random.default_rng(1)
    if op == "attention":
        sizes, length = ((64,), 128) if small else ((64, 128, 256), 1024)
        return [case for size in sizes for case in attention_cases(size, length, rng)]
    if op == "grouped_matmul":
        return list(grouped_cases(rng))
    if op == "paged_attention":
        finite = [c for c in conformance.CASES[OPS[op]] if "finite" in c.name and c.name.endswith("bfloat16")]
        return finite if small else [*finite, *paged_cases(rng)]
    if op == "gated_linear_unit":
        return list(gated_cases(rng, 64, 128) if small else gated_cases(rng, 512, 1024))
    return [c for c in conformance.CASES[OPS[op]] if c.name.endswith("bfloat16") or op == "rms_norm"]


class Numbers(KernelSuite):
    """Measurement of one kernel on one target, without the suite's assertions."""

    def __init__(self, op, name, target, platform):
        self.op, self.name, self.target, self.platform = OPS[op], name, target, platform

    def find_declaration(self, name):
        return attrs.evolve(super().find_declaration(name), platforms=())

    def _only(self, *implementations):
        return selection.use(
            selection.Selection(
                platform=self.platform,
                target=self.target,
                declared=lambda op: implementations if op == self.op else (),
            )
        )

    def refusal(self, case):
        """Return why the kernel does not support the call, or None if it does."""
        return self._refusal(case, self.find_declaration(self.name))

    def measured(self, case):
        """Return (results, gradients) of the kernel."""
        return self._split(self._measure(case, self.name), case)

    def reference(self, case):
        """Return (results, gradients) of the reference, computed in float32."""
        wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, case.operands)
        with jax.default_matmul_precision("highest"):
            return self._split(self._measure(attrs.evolve(case, operands=wide), self.baseline), case)

    @staticmethod
    def _split(tree, case):
        return tree if case.gradients else (tree, None)


def suite_of(op, name, target, platform):
    """Return the object that measures a kernel."""
    return Numbers(op, name, target, platform)


def relative_error(values, expected):
    """Return the largest error of all arrays, relative to the norm of the expected array, or None without arrays."""
    errors = []
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        errors.append(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)))
    return float(np.max(errors)) if errors else None
