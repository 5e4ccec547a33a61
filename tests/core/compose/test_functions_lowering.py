"""Settings of a target apply only while its programs are lowered."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.functions import Function, Part
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.resolve import resolve

in_force = []


@contextlib.contextmanager
def hold(target):
    """Of the target `here`."""
    in_force.append(target.name)
    try:
        yield
    finally:
        in_force.remove(target.name)


@pytest.fixture
def lowerings(monkeypatch):
    """What holds at each call of JAX's lowering."""
    lower, lowerings = jax.stages.Traced.lower, []

    def record(self, **options):
        lowerings.append(tuple(in_force))
        return lower(self, **options)

    monkeypatch.setattr(jax.stages.Traced, "lower", record)
    return lowerings


def program(call, target):
    instance = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    instance.functions["draw"] = Function(call=call, inputs=lambda bucket: (Part.KEY,))
    instance.target = target
    return instance


def test_it_holds_while_a_program_is_lowered_and_no_longer(lowerings):
    traced = []

    def draw(key):
        traced.append(tuple(in_force))
        return jax.random.normal(key, (3,))

    target = Target(name="here", lowering=f"{__name__}:hold")
    compiled = program(draw, target).compile("draw")
    assert (traced, lowerings, in_force) == ([()], [("here",)], [])
    assert compiled(jax.random.key(0)).shape == (3,)


def test_nothing_holds_where_the_target_asks_for_nothing(lowerings):
    for target in (None, Target(name="here")):
        program(lambda key: jnp.zeros(3), target).compile("draw")
    assert lowerings == [(), ()]


def test_it_ends_where_the_lowering_fails(monkeypatch):
    def fail(self, **options):
        raise ValueError(f"while {in_force} holds")

    instance = program(lambda key: jnp.zeros(3), Target(name="here", lowering=f"{__name__}:hold"))
    monkeypatch.setattr(jax.stages.Traced, "lower", fail)
    with pytest.raises(ValueError, match=r"while \['here'\] holds"):
        instance.compile("draw")
    assert in_force == []
