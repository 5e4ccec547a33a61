"""Options of XLA: the target's, over them the config's, and what is kept of them."""

import attrs
import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose import compose
from axlearn_core.compose.functions import Function
from axlearn_core.config import patch
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import ConfigError, PluginError
from axlearn_core.kernels import selection
from axlearn_core.kernels.op import Op
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run.record import lock_drift

TARGET = Target(name="here", compiler_options={"xla_backend_optimization_level": 1, "xla_cpu_enable_fast_math": False})


def program(**options):
    """A program whose only function is one to compile."""
    instance = compose(resolve("quickstart", target="none").config, jax.devices()[:1])
    instance.target = TARGET
    instance.mesh = patch(Mesh(), {f"compiler_options.{k}": v for k, v in options.items()})
    instance.functions = {"train": Function(call=lambda x: x + 1)}
    instance.lower = lambda name, batch: jax.jit(instance.functions[name].call).lower(batch["x"])
    return instance


def test_the_config_has_the_last_word():
    assert program().compiler_options == TARGET.compiler_options
    ours = program(xla_cpu_enable_fast_math=True, xla_llvm_disable_expensive_passes=True)
    assert ours.compiler_options == {
        "xla_backend_optimization_level": 1,
        "xla_cpu_enable_fast_math": True,
        "xla_llvm_disable_expensive_passes": True,
    }
    assert ours.compile("train", {"x": jnp.ones(3)})(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("xla_cpu_fats_math", True, "No such compile option"), ("xla_cpu_enable_fast_math", "maybe", "not a valid bool")],
)
def test_an_option_that_xla_refuses_is_an_error_of_the_config(name, value, says):
    with pytest.raises(ConfigError) as error:
        program(**{name: value}).compile("train", {"x": jnp.ones(3)})
    assert f"mesh.compiler_options.{name}" in str(error.value)
    assert says in str(error.value)
    assert repr(value) in str(error.value)


def test_one_of_the_target_is_not_blamed_on_the_config():
    instance = program(xla_cpu_enable_fast_math=True)
    instance.target = attrs.evolve(TARGET, compiler_options={"xla_of_another_version": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_another_version"):
        instance.compile("train", {"x": jnp.ones(3)})


def test_other_flags_than_those_of_the_lock_are_told():
    before = {"python": "3.11", "flags": {}}
    assert lock_drift(before, before) == []
    (drift,) = lock_drift(before, before | {"flags": {"XLA_FLAGS": "--xla_x"}})
    assert drift == "flags: was {}, is {'XLA_FLAGS': '--xla_x'}"


@attrs.frozen(eq=False)
class Twice(Op[jax.Array]):
    """2 x."""

    name = "twice"
    x: jax.Array

    def operands(self):
        return {"x": self.x}

    def reference(self):
        return self.x + self.x


OPTION, NEEDED = "xla_cpu_enable_fast_math", {"cpu": {"xla_cpu_enable_fast_math": True}}


def with_kernels(kernels, platform="cpu", **options):
    """A program that calls `Twice` by each of these kernels: name -> the options that it needs."""
    instance = program(**options)
    load = f"{selection.__name__}:REFERENCE_KERNEL"
    declared = [
        KernelImplementation(name=name, op=Twice.path(), load=load, compiler_options=needs)
        for name, needs in kernels.items()
    ]
    chosen = selection.Selection(platform=platform, declared=lambda _: declared)
    instance.selection = lambda _: chosen

    def lower(name, batch):
        def call(x):
            for kernel in kernels:
                x = Twice(x).run(kernel)
            return x

        with selection.use(chosen):
            return jax.jit(call).lower(batch["x"])

    instance.lower = lower
    return instance


X = {"x": jnp.ones(3)}


def test_a_kernel_s_options_hold_for_its_program():
    instance = with_kernels({"careful": NEEDED}, xla_llvm_disable_expensive_passes=True)
    assert instance.options("train") == instance.compiler_options  # no kernel is chosen yet
    assert instance.compile("train", X)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert instance.options("train") == {
        "xla_backend_optimization_level": 1,
        OPTION: True,
        "xla_llvm_disable_expensive_passes": True,
    }
    assert with_kernels({"careful": NEEDED}, **{OPTION: True}).compile("train", X)


def test_a_kernel_s_options_reach_the_compiler():
    instance = with_kernels({"wrong": {"cpu": {"xla_of_another_version": 3}}})
    with pytest.raises(PluginError, match=r"the twice kernel 'wrong' needs an option that .* rejects: No such compile"):
        instance.compile("train", X)
    instance = with_kernels({"elsewhere": {"gpu": {"xla_of_another_version": 3}}})
    assert instance.compile("train", X)(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_config_cannot_change_what_a_kernel_needs():
    with pytest.raises(ConfigError) as error:
        with_kernels({"careful": NEEDED}, **{OPTION: False}).compile("train", X)
    assert f"mesh.compiler_options.{OPTION}: the twice kernel 'careful' needs another value" in str(error.value)
    assert "expected: True" in str(error.value)


def test_kernels_that_need_different_values_are_refused():
    kernels = {"careful": NEEDED, "careless": {"cpu": {OPTION: False}}}
    with pytest.raises(
        PluginError, match=r"kernel 'careless' cannot be in the same program as the twice kernel 'careful'"
    ):
        with_kernels(kernels).compile("train", X)
