"""Functions that several threads compile at once."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.functions import Function, Part
from axlearn_core.plugins.resolve import resolve


@pytest.fixture
def program():
    """With functions that note which threads trace them, and that take a while to trace."""
    instance = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    instance.traced, inside = [], []

    def draw(key, name):
        instance.traced.append((name, len(inside)))
        inside.append(name)
        time.sleep(0.05)
        inside.remove(name)
        return jax.random.normal(key, (3,)) * jnp.float32(len(name))

    for name in ("one", "two", "three"):
        instance.functions[name] = Function(call=functools.partial(draw, name=name), inputs=lambda bucket: (Part.KEY,))
    return instance


def test_each_is_compiled_once_and_traced_alone(program):
    together = threading.Barrier(6)

    def compile_one(name):
        together.wait()
        return program.compile(name)

    names = ["one", "two", "three"] * 2
    with ThreadPoolExecutor(6) as pool:
        compiled = dict(zip(names, pool.map(compile_one, names), strict=True))
    assert sorted(program.traced) == [("one", 0), ("three", 0), ("two", 0)]
    assert sorted(name for name, _ in program.compiled) == ["one", "three", "two"]
    for name in names:
        assert program.compile(name) is compiled[name]


def test_a_failure_is_that_of_each_who_asks(program):
    program.functions["bad"] = Function(call=lambda key: key.nothing, inputs=lambda bucket: (Part.KEY,))
    for _ in range(2):
        with pytest.raises(AttributeError):
            program.compile("bad")
    assert program.compile("one") is not None


def test_all_are_traced_by_the_thread_that_asks_and_under_its_settings(program):
    threads = []

    def multiply(key):
        threads.append(threading.current_thread())
        return jnp.ones((2, 2)) @ jnp.ones((2, 2))

    for name in ("four", "five"):
        program.functions[name] = Function(call=multiply, inputs=lambda bucket: (Part.KEY,))
    functions = [(name, None) for name in ("one", "two", "four", "five")]
    with jax.default_matmul_precision("highest"):
        program.compile_all(functions)
    assert threads == [threading.current_thread()] * 2
    assert {name for name, _ in program.compiled} == {name for name, _ in functions}
    assert "operand_precision={highest,highest}" in program.compile("four").as_text()
    program.compile_all(functions)  # once
    assert len(threads) == 2


def test_one_that_fails_among_many(program):
    program.functions["bad"] = Function(call=lambda key: key.nothing, inputs=lambda bucket: (Part.KEY,))
    with pytest.raises(AttributeError):
        program.compile_all([("one", None), ("bad", None), ("two", None)])
    assert program.compile("two") is not None
