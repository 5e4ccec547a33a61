import sys

import attrs
import jax
import jax.numpy as jnp
import pytest

from axlearn_core.compose.kernel_notes import replaced_kernels
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.errors import PluginError, RequestError
from axlearn_core.kernels import selection
from axlearn_core.kernels.selection import REFERENCE_KERNEL, Selection, choose, use
from axlearn_plugins_transformer.kernels.attention import XLA_BLOCKED, AttentionOp
from axlearn_plugins_transformer.kernels.cross_entropy import CrossEntropyOp
from axlearn_plugins_transformer.kernels.masks import Causal, Full, Segments

PATH = "axlearn_plugins_transformer.kernels.attention:AttentionOp"
X = jnp.zeros((1, 256, 2, 8))


def call(mask=None, **options):
    return AttentionOp(X, X, X, mask=mask or Causal(), scale=1.0, **options)


def test_the_reference_runs_outside_a_program():
    assert choose(call()) is REFERENCE_KERNEL


def test_selection_takes_the_highest_priority_and_keeps_the_reasons():
    with use(Selection(platform="cpu")) as program:
        assert choose(call()) is XLA_BLOCKED
        assert choose(call()) is XLA_BLOCKED
        assert choose(call(Full())) is REFERENCE_KERNEL
    assert [c.name for c in program.choices] == ["xla-blocked", "xla"]
    assert program.choices[1].rejected["xla-blocked"] == "the mask (full) does not hide any whole block"
    assert "attention(query float32[1, 256, 2, 8]" in program.choices[0].call
    assert choose(call()) is REFERENCE_KERNEL  # and it is over


def test_a_kernel_that_does_not_declare_an_optional_operand_is_rejected():
    sinks = call(sinks=jnp.zeros((2,)))
    old = KernelImplementation(name="old", op=PATH, load=f"{XLA_BLOCKED.__module__}:XLA_BLOCKED", priority=99)
    with use(Selection(platform="cpu", declared=lambda op: [*selection.installed(op), old])) as program:
        assert choose(call()) is XLA_BLOCKED
        sinks.run()
    assert [c.name for c in program.choices] == ["old", "xla-blocked"]
    assert program.choices[1].rejected["old"] == "does not support sinks"
    with use(Selection(platform="cpu")), pytest.raises(RequestError, match=r"invariant: does not support log_sum_exp"):
        choose(call(log_sum_exp=True), "invariant")


def test_a_choice_reads_as_in_the_locks_of_earlier_versions():
    with use(Selection(platform="cpu", target="h100", declared=lambda op: [selection.reference(op)])) as program:
        call().run()
    array = "(1, 256, 2, 8)"
    assert str(program.choices[0]) == (
        f"Choice(request=OpRequest(op='attention', platform='cpu', shapes={{'query': {array}, 'key': {array}, 'value': "
        f"{array}}}, dtypes={{'query': 'float32', 'key': 'float32', 'value': 'float32'}}, options={{'mask': 'causal', "
        "'softcap': None, 'bias': None, 'aligned': True, 'skips': True}, gradients=True, target='h100'), name='xla', "
        "rejected={})"
    )


def test_a_name_is_that_one_or_one_clear_error():
    assert choose(call(), "xla-blocked") is XLA_BLOCKED
    with use(Selection(platform="cpu")):
        assert choose(call(), "xla") is REFERENCE_KERNEL
        with pytest.raises(RequestError, match=r"unknown attention kernel 'xla-blokced'\n.*did you mean: xla-blocked"):
            choose(call(), "xla-blokced")
        with pytest.raises(
            RequestError,
            match=r"'xla-blocked' cannot do this\n.*\n.*does not hide any whole block\n.*choose another: (?!.*xla-blocked)",
        ):
            call(Full()).run("xla-blocked")


def test_a_function_that_shares_the_config_prefers_the_named_kernel():
    with use(Selection(platform="cpu", required=())) as program:
        assert choose(call(), "xla-blocked") is XLA_BLOCKED
        assert choose(call(Full()), "xla-blocked") is REFERENCE_KERNEL
        assert choose(call(), "xla") is REFERENCE_KERNEL
        assert choose(call(), "native") is XLA_BLOCKED  # a kernel of another op
        with pytest.raises(RequestError, match="unknown attention kernel 'xla-blokced'"):
            choose(call(), "xla-blokced")
    assert [str(d) for d in replaced_kernels("decode", program.choices)] == [
        "kernel: decode: attention uses xla instead of xla-blocked (the mask (full) does not hide any whole block)",
        "kernel: decode: attention uses xla-blocked instead of native (not a kernel of attention)",
    ]
    with use(Selection(platform="cpu", required=("attention",))), pytest.raises(RequestError, match="cannot do this"):
        choose(call(Full()), "xla-blocked")


def test_platforms_priorities_and_what_cannot_be_loaded():
    def declared(op):
        load = "axlearn_core.kernels.selection:REFERENCE_KERNEL"
        return [
            KernelImplementation(name="b", op=op.path(), load=load, priority=5),
            KernelImplementation(name="a", op=op.path(), load=load, priority=5),
            KernelImplementation(name="fast", op=op.path(), load=f"{load}_", priority=9, platforms=("tpu",)),
        ]

    with use(Selection(platform="cpu", declared=declared)) as program:
        call().run()
    assert program.choices[0].name == "a"  # by name among equals, regardless of the order of installation
    assert program.choices[0].rejected == {"fast": "runs on tpu, not on cpu"}
    with use(Selection(platform="tpu", declared=declared)), pytest.raises(PluginError, match="'fast' cannot be loaded"):
        call().run()
    with (
        use(Selection(platform="cpu", declared=lambda op: [])),
        pytest.raises(RequestError, match="no kernel is installed"),
    ):
        call().run()


def host_of(*claims):
    class Host:
        def call(self, hook):
            return [(origin, [KernelImplementation(name=name, op=PATH, load="m:a")]) for origin, name in claims]

    return Host


def test_two_plugins_with_one_kernel_name_are_an_error(monkeypatch):
    monkeypatch.setattr("axlearn_core.plugins.manager.host", host_of(("one 1.0", "fast"), ("k of other 1.0", "fast")))
    with pytest.raises(PluginError, match=r"'fast' is claimed by one 1\.0 and by k of other 1\.0"):
        selection.installed(AttentionOp)
    monkeypatch.setattr("axlearn_core.plugins.manager.host", host_of(("one 1.0", "xla")))
    with pytest.raises(PluginError, match=r"'xla' is claimed by the op and by one 1\.0"):
        selection.installed(AttentionOp)
    assert [k.name for k in selection.installed(CrossEntropyOp)] == ["xla"]  # the claims are about another op


def test_kernels_of_a_compiled_program_are_imported(monkeypatch):
    class Host:
        def call(self, hook):
            fast = KernelImplementation(name="fast", op=PATH, load="colorsys:rgb_to_hsv")
            gone = KernelImplementation(name="gone", op=PATH, load="no_such_module:KERNEL")
            return [("one 1.0", [fast, gone])]

    monkeypatch.setattr("axlearn_core.plugins.manager.host", Host)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    selection.import_kernels([(PATH, "xla"), (PATH, "fast")])
    assert "colorsys" in sys.modules
    with pytest.raises(PluginError, match="'gone' cannot be loaded"):
        selection.import_kernels([(PATH, "gone")])
    with pytest.raises(RequestError, match=r"uses the kernel 'other' of .*which no installed plugin provides"):
        selection.import_kernels([(PATH, "other")])


@pytest.mark.parametrize("wrong", [{"op": "attention"}, {"load": "module"}])
def test_a_declaration_names_a_module_and_what_is_in_it(wrong):
    with pytest.raises(ValueError, match="'module:name', got"):
        KernelImplementation(**{"name": "fast", "op": PATH, "load": "m:a"} | wrong)


def test_installed_kernels_come_through_the_hook():
    assert {k.name for k in selection.installed(AttentionOp)} >= {"xla", "xla-blocked"}
    # Others may be installed, and wait to be named.
    assert [k.name for k in selection.installed(CrossEntropyOp) if k.priority >= 0] == ["xla"]


def test_ops_are_equal_by_what_kernels_decide_by():
    ids = jnp.zeros((1, 256), jnp.int32)
    packed = call(Causal() & Segments(ids, ids))
    assert packed == packed.abstract()
    assert hash(packed) == hash(packed.abstract())
    assert packed != call()
    assert call(softcap=2.0) != call()
    assert call() != attrs.evolve(call(), value=X.astype("bfloat16"))
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(packed.abstract()._fields()))
    assert packed.bytes() == 4 * X.nbytes + 2 * ids.nbytes


def test_the_visible_share_is_that_of_the_mask():
    assert call().visible() == 0.5
    assert call(key_slots=jnp.arange(256)[None]).visible() == 1.0
