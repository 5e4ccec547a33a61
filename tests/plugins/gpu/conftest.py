import contextlib
import itertools
from unittest import mock

import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from axlearn_plugins_gpu.kernels import mosaic, tokamax


@pytest.fixture(autouse=True)
def compiler():
    pytest.importorskip("jax_cuda12_plugin", reason="needs XLA's GPU compiler")


@pytest.fixture
def library():
    if reason := tokamax.missing():
        pytest.skip(reason)


@pytest.fixture
def first_kernel(monkeypatch):
    """As if this process had compiled none in Mosaic: it compiles none in this test."""
    first = {}
    monkeypatch.setattr(mosaic, "_first", first)
    return first


@pytest.fixture
def interpreted(library, monkeypatch):
    """Kernels run in Pallas' interpreter."""
    call, number = pallas.pallas_call, pallas.program_id

    def run(kernel, *args, **options):
        def hoisted(*references):  # the interpreter does not know the number of a block within a loop or a branch
            numbers = []
            with contextlib.suppress(ValueError):  # beyond the last axis of the grid
                for axis in itertools.count():
                    numbers.append(number(axis))

            def known(axis):
                return numbers[axis] if axis < len(numbers) else number(axis)

            with mock.patch.object(pallas, "program_id", known):
                return kernel(*references)

        return call(hoisted, *args, interpret=True, **options)

    monkeypatch.setattr(pallas, "pallas_call", run)
    references = tokamax.module("pallas.block").BlockRefIndexer
    at = references.__getitem__

    def indexed(self, index):  # nor plain integers among slices
        index = index if isinstance(index, tuple) else (index,)
        return at(self, tuple(jnp.int32(i) if type(i) is int else i for i in index))

    monkeypatch.setattr(references, "__getitem__", indexed)
