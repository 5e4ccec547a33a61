import jax.numpy as jnp
import pytest

from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.errors import PluginError, RequestError
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import Selection, chosen, use
from axlearn_plugins_transformer.kernels.attention import XLA, XLA_BLOCKED, attention
from axlearn_plugins_transformer.kernels.masks import Causal, Full

SHAPES = {n: jnp.zeros((1, 256, 2, 8)) for n in ("query", "key", "value")}
OPTIONS = {"mask": "causal", "softcap": None, "aligned": True, "skips": True}


def request(**options):
    return chosen("attention", SHAPES, OPTIONS | options)


def test_the_reference_runs_outside_a_program():
    assert request() is XLA


def test_a_program_gets_the_highest_priority_that_supports_the_call_and_keeps_the_reasons():
    with use(Selection(platform="cpu")) as program:
        assert request() is XLA_BLOCKED
        assert request() is XLA_BLOCKED
        assert request(skips=False, mask="full") is XLA
    assert [c.name for c in program.choices] == ["xla-blocked", "xla"]
    assert program.choices[1].rejected["xla-blocked"] == "the mask (full) hides no whole block"
    assert "attention(query float32[1, 256, 2, 8]" in str(program.choices[0].request)
    assert request() is XLA  # and it is over


def test_a_name_is_that_one_or_one_clear_error():
    assert chosen("attention", SHAPES, OPTIONS, "xla-blocked") is XLA_BLOCKED
    with use(Selection(platform="cpu")):
        assert chosen("attention", SHAPES, OPTIONS, "xla") is XLA
        with pytest.raises(RequestError, match=r"unknown attention kernel 'xla-blokced'\n.*did you mean: xla-blocked"):
            chosen("attention", SHAPES, OPTIONS, "xla-blokced")
        with pytest.raises(RequestError, match=r"'xla-blocked' cannot do this\n.*\n.*hides no whole block\n.*fix:"):
            attention(*SHAPES.values(), mask=Full(), scale=1.0, kernel="xla-blocked")


def test_platforms_priorities_and_what_cannot_be_loaded():
    def declared(op):
        module = "axlearn_plugins_transformer.kernels.attention"
        load = f"{module}:XLA"
        return [
            KernelImplementation(name="b", op=op, load=load, priority=5),
            KernelImplementation(name="a", op=op, load=load, priority=5),
            KernelImplementation(name="fast", op=op, load=f"{module}:Nope", priority=9, platforms=("tpu",)),
        ]  # fmt: skip

    with use(Selection(platform="cpu", declared=declared)) as program:
        request()
    assert program.choices[0].name == "a"  # by name among equals, whatever the order of installation
    assert program.choices[0].rejected == {"fast": "runs on tpu, not on cpu"}
    with use(Selection(platform="tpu", declared=declared)), pytest.raises(PluginError, match="'fast' cannot be loaded"):
        request()
    with use(Selection(platform="cpu", declared=lambda op: [])), pytest.raises(RequestError, match="none is installed"):
        request()


def test_two_plugins_with_one_kernel_name_are_an_error(monkeypatch):
    class Host:
        def answers(self, hook, op):
            one = KernelImplementation(name="xla", op=op, load="m:a")
            return [("kernels of axlearn-core 0.1.0", [one]), ("k of other 1.0", [one])]

    monkeypatch.setattr("axlearn_core.plugins.manager.host", Host)
    with pytest.raises(
        PluginError, match=r"'xla' is claimed by kernels of axlearn-core 0\.1\.0 and by k of other 1\.0"
    ):
        selection.installed("attention")


def test_the_cores_own_kernels_come_through_the_hook():
    assert {k.name for k in selection.installed("attention")} >= {"xla", "xla-blocked"}
    # Others may be installed, and wait to be named.
    assert [k.name for k in selection.installed("cross_entropy") if k.priority >= 0] == ["xla"]


def test_a_model_under_a_program_uses_the_chosen_kernel():
    with use(Selection(platform="cpu")) as program:
        attention(*SHAPES.values(), mask=Causal(), scale=1.0)
    assert [c.name for c in program.choices] == ["xla-blocked"]
