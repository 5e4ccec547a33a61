"""What a target asks for while its programs are lowered: it holds then, and at no other time."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.functions import Function, Part
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.resolve import resolve

held = []


@contextlib.contextmanager
def hold(target):
    """Of the target `here`."""
    held.append(target.name)
    try:
        yield
    finally:
        held.remove(target.name)


@pytest.fixture
def seen(monkeypatch):
    """What holds at each call of JAX's lowering."""
    lower, seen = jax.stages.Traced.lower, []

    def record(self, **options):
        seen.append(tuple(held))
        return lower(self, **options)

    monkeypatch.setattr(jax.stages.Traced, "lower", record)
    return seen


def program(call, target):
    instance = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    instance.functions["draw"] = Function(call=call, inputs=lambda bucket: (Part.KEY,))
    instance.target = target
    return instance


def test_it_holds_while_a_program_is_lowered_and_no_longer(seen):
    traced = []

    def draw(key):
        traced.append(tuple(held))
        return jax.random.normal(key, (3,))

    target = Target(name="here", lowering=f"{__name__}:hold")
    compiled = program(draw, target).compile("draw")
    assert (traced, seen, held) == ([()], [("here",)], [])
    assert compiled(jax.random.key(0)).shape == (3,)


def test_nothing_holds_where_the_target_asks_for_nothing(seen):
    for target in (None, Target(name="here")):
        program(lambda key: jnp.zeros(3), target).compile("draw")
    assert seen == [(), ()]


def test_it_ends_where_the_lowering_fails(monkeypatch):
    def fail(self, **options):
        raise ValueError(f"while {held} holds")

    instance = program(lambda key: jnp.zeros(3), Target(name="here", lowering=f"{__name__}:hold"))
    monkeypatch.setattr(jax.stages.Traced, "lower", fail)
    with pytest.raises(ValueError, match=r"while \['here'\] holds"):
        instance.compile("draw")
    assert held == []
