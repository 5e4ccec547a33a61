"""Attempts to load an executable of another program: each difference has to be seen, or the program is compiled."""

import functools
import json
import operator

import attrs
import jax
import numpy as np
import pytest

from axlearn_core.compose import compose, executables, identity
from axlearn_core.compose.identity import dependency_versions, program_identity, read_compile_settings, value_text
from axlearn_core.config import Configurable, node, patch
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import resolve
from support import cli_runs

SET = {s.partition("=")[0]: json.loads(s.partition("=")[2]) for s in cli_runs.SETTINGS if s[-1].isdigit()}


@functools.cache
def config():
    return resolve("quickstart", target="none", set=SET | {"input.batch_size": 4}).config


def program(cfg=None, devices=1):
    return compose(cfg or config(), jax.devices()[:devices])


def parts(composed):
    return program_identity(composed, {"config": composed.config}, ["init", "train", "weights"])


@pytest.fixture(scope="module")
def whole():
    return parts(program())


def differs(actual, expected):
    """The names that only one of two identities has, or that have two values."""
    return {n for n in {**actual, **expected} if actual.get(n) != expected.get(n)}


def test_equal_programs_have_equal_identities(whole):
    assert parts(program()) == whole
    assert {"config.model.decoder.hidden_dim", "arrays", "code of axlearn_core", "python"} <= whole.keys()
    assert {f"version of {name}" for name in ("jax", "jaxlib", "flax", "numpy", "optax")} <= whole.keys()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"learner.optimizer.weight_decay": 0.5}, "config.learner.optimizer.weight_decay"),
        ({"mesh.compiler_options": {"xla_cpu_enable_fast_math": True}}, "compiler_options.xla_cpu_enable_fast_math"),
    ],
)
def test_another_config(whole, changes, name):
    assert name in differs(parts(program(patch(config(), changes))), whole)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_enable_latency_hiding_scheduler=true"),
        ("NEURON_CC_FLAGS", "--optlevel=3"),
        ("AXLEARN_PLUGINS", "-features:moe"),
    ],
)
def test_another_flag(whole, monkeypatch, variable, value):
    composed = program()
    monkeypatch.setenv(variable, value)
    assert differs(parts(composed), whole) == {variable}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_threefry_partitionable", False),
        ("jax_pallas_enable_debug_checks", True),
        ("jax_numpy_dtype_promotion", "strict"),
    ],
)
def test_another_option_of_jax(whole, option, value):
    composed, before = program(), jax.config.values[option]
    jax.config.update(option, value)
    try:
        assert differs(parts(composed), whole) == {option}
    finally:
        jax.config.update(option, before)


def test_an_option_of_this_thread(whole):
    with jax.default_matmul_precision("highest"):
        assert differs(parts(program()), whole) == {"jax_default_matmul_precision"}


def test_another_topology(whole):
    assert {"arrays", "mesh.data"} & differs(parts(program(devices=2)), whole)


def test_other_donation_gradients_or_kernels(whole):
    changes = {"donate": (), "differentiates": False, "required_kernels": ("attention",)}
    for field, value in changes.items():
        composed = program()
        composed.functions["train"] = attrs.evolve(composed.functions["train"], **{field: value})
        assert differs(parts(composed), whole) == {"function train"}, field


def test_arrays_that_no_config_gives(whole):
    composed = program()
    part = next(iter(p for p in composed.parts if p.name == "WEIGHTS"))
    composed.parts[part] = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*s.shape, 2), s.dtype), composed.parts[part])
    assert differs(parts(composed), whole) == {"arrays"}


def test_another_version_or_code(whole, monkeypatch):
    composed = program()
    versions = dict(dependency_versions()) | {"optax": "0.0.1"}
    monkeypatch.setattr(identity, "dependency_versions", lambda packages: versions)
    assert "version of optax" in differs(parts(composed), whole)
    monkeypatch.setattr(identity, "source_hashes", lambda: {"axlearn_core": "0"})
    assert "code of axlearn_core" in differs(parts(composed), whole)


def test_where_things_are_and_what_is_printed_does_not_matter(whole, monkeypatch):
    composed = program()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_dump_to=/nowhere")
    before = jax.config.values["jax_log_compiles"]
    jax.config.update("jax_log_compiles", not before)
    try:
        assert not {n for n in differs(parts(composed), whole) if n != "XLA_FLAGS"}
        assert "dump" not in parts(composed)["XLA_FLAGS"]
        assert "device_count" not in parts(composed)["XLA_FLAGS"]
    finally:
        jax.config.update("jax_log_compiles", before)


def make(factor):
    def scaled(x):
        return factor * x

    return scaled


class Thing:
    def method(self):
        pass


@pytest.mark.parametrize(
    "value",
    [make(2), lambda x: x, Thing(), Thing().method, (1, make(2)), functools.partial(make(2), 1), np.arange(2000)],
    ids=["composed", "lambda", "object", "method", "inside", "partial", "array"],
)
def test_a_value_that_no_text_tells_from_others(value):
    """`repr` without addresses, or with dots in it, is equal for values that compute otherwise."""
    assert value_text(value) is None


def test_values_with_a_text():
    assert value_text(make) == f"{__name__}:make"
    assert value_text(jax.nn.silu) != value_text(jax.nn.gelu)
    partials = [
        functools.partial(operator.add, 1),
        functools.partial(operator.add, 2),
        functools.partial(operator.mul, 1),
    ]
    assert len({value_text(p) for p in partials}) == 3
    assert value_text(1) != value_text(1.0) != value_text("1.0")


class Local(Configurable):
    @node
    class Config(Configurable.Config["Local"]):
        size: int = 1


def test_code_that_has_no_version_has_no_identity():
    assert program_identity(program(), {"config": config(), "local": Local.Config()}, ["train"]) is None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`init`, exported with its identity."""
    directory, composed = tmp_path_factory.mktemp("export") / "executables", program()
    composed.export(directory, {"init": [None]}, parts(composed))
    return directory


@pytest.mark.fast_cases("NEURON_CC_FLAGS")
@pytest.mark.slow_cases("XLA_FLAGS")
@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "NEURON_CC_FLAGS"])
def test_an_export_is_of_its_flags_even_if_its_program_is_compared(exported, monkeypatch, variable):
    composed = program()
    assert composed.load(exported) == ["init"]
    monkeypatch.setenv(variable, "--xla_cpu_enable_fast_math=true")
    with pytest.raises(RequestError, match=f"exported with a different value of {variable}"):
        composed.load(exported)


def test_an_export_is_of_its_options_even_if_its_program_is_compared(exported):
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not before)
    try:
        with pytest.raises(RequestError, match="a different value of jax_disable_most_optimizations"):
            program().load(exported)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert "jax_disable_most_optimizations" in read_compile_settings()


@pytest.mark.slow
def test_further_options_of_the_compiler_compile_anew(exported, monkeypatch):
    composed = program()
    composed.load(exported, parts(composed))
    loaded = []
    monkeypatch.setattr(executables, "load", lambda *args: loaded.append(args))
    with_option = composed.compile("init", xla_embed_ir_in_executable=True)
    assert with_option is not None
    assert not loaded, "the export was compiled without this option"


@pytest.mark.fast_cases("before")
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_identity_speaks_for_its_own_export_alone(exported, tmp_path, first):
    """Of two exports in one program, only the one that came with an identity is taken without a look at its program."""
    other = program(patch(config(), {"model.decoder.embedding.init.scale": 0.5}))
    other.export(tmp_path / "weights", {"weights": [None]}, parts(other))
    loads = [lambda: other.load(exported), lambda: other.load(tmp_path / "weights", parts(other))]
    for load in loads if first else reversed(loads):
        load()
    with pytest.raises(RequestError, match="the program of init changed"):
        other.compile("init")


def test_what_was_loaded_again_with_an_identity_is_taken_by_it(exported, monkeypatch):
    composed = program()
    composed.load(exported)
    composed.load(exported, parts(composed))
    monkeypatch.setattr(type(composed), "lower", lambda *args: pytest.fail("it was traced"))
    assert composed.compile("init") is not None
