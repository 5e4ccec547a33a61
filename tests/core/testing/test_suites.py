"""The suites find what is wrong: each of these parts breaks one promise, and the test for it fails."""

import sys
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.config import REQUIRED, Configurable, interface, node
from axlearn_core.contracts.kernels import KernelImplementation
from axlearn_core.kernels import selection
from axlearn_core.kernels.op import Op
from axlearn_core.learn import Learner
from axlearn_core.nn.initializers import Constant
from axlearn_core.nn.layer import Layer
from axlearn_core.nn.remat import tag
from axlearn_core.testing import (
    Case,
    CheckpointerSuite,
    FeatureSuite,
    InputSuite,
    KernelSuite,
    LayerSuite,
    LearnerSuite,
    StorageSuite,
    TrackerSuite,
    TrainerSuite,
)  # fmt: skip
from axlearn_core.testing.train import Numbers
from axlearn_core.train.loop import TrainLoop

FAILS = (AssertionError, pytest.fail.Exception)


class Scale(Layer):
    """`weight * x`, and the ways to get that wrong."""

    @node
    class Config(Layer.Config["Scale"]):
        dim: int = interface(default=REQUIRED)
        wrong: str = ""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision):
        super().__init__(cfg, precision=precision)
        axis = {"unnamed": None, "unknown": "weird"}.get(cfg.wrong, "norm")
        self.weight = self.parameter(rngs, Constant(value=2.0), (cfg.dim,), (axis,))
        if cfg.wrong == "recompiles":
            self.function = lambda x: x

    def __call__(self, x: jax.Array) -> jax.Array:
        wrong, weight = self.cfg.wrong, self.computed(self.weight)[None, None]
        if wrong == "dtype":
            weight = weight.astype("float32")
        if wrong == "shape":
            return (x * weight)[:, 1:]
        if wrong == "nan":
            return x * weight / 0
        if wrong == "gradient":
            return x * weight - jax.lax.stop_gradient(0.1 * x * weight)
        return tag(x * weight, "scaled")


def layer(wrong, **more):
    return type("Suite", (LayerSuite,), {"config": Scale.Config(wrong=wrong), "meshes": 1, **more})()


@pytest.mark.parametrize(
    ("wrong", "test", "args"),
    [
        ("dtype", "test_outputs_have_the_promised_shapes_and_dtypes", ("bfloat16", "bfloat16")),
        ("shape", "test_outputs_have_the_promised_shapes_and_dtypes", ("float32", "float32")),
        ("nan", "test_outputs_are_finite", ("float32",)),
        ("unnamed", "test_every_parameter_axis_is_named", ()),
        ("unknown", "test_every_parameter_axis_is_named", ()),
        ("gradient", "test_gradients", ()),
        ("recompiles", "test_equal_shapes_compile_once", ()),
    ],
)
def test_layers(wrong, test, args):
    getattr(layer(""), test)(*args)
    with pytest.raises(FAILS):
        getattr(layer(wrong), test)(*args)


def test_a_reference_that_says_otherwise():
    layer("", reference=staticmethod(lambda params, x: x * params["weight"][None, None])).test_gradients()
    with pytest.raises(AssertionError, match="outputs"):
        layer("", reference=staticmethod(lambda params, x: 1.01 * x * params["weight"][None, None])).test_gradients()


def test_a_layer_of_no_known_contract_is_told_to_say_it():
    class Odd(Layer):
        @node
        class Config(Layer.Config["Odd"]):
            width: int = interface(default=REQUIRED)

    with pytest.raises(FAILS, match="set `contract`"):
        type("Suite", (LayerSuite,), {"config": Odd.Config()})().test_every_parameter_axis_is_named()


@attrs.frozen(eq=False)
class Product(Op):
    """x @ x."""

    name = "product"
    x: Any
    flops_factor: float = 1.0
    bytes_factor: float = 1.0

    def operands(self):
        return {"x": self.x}

    def reference(self):
        return self.x @ self.x

    def flops(self):
        return 2 * self.x.shape[0] ** 3 * self.flops_factor

    def bytes(self):
        return super().bytes() * self.bytes_factor


class Multiplying:
    def __init__(self, refuses=None, factor=1.0):
        self.refuses, self.factor = refuses, factor

    def supports(self, op, context):
        return self.refuses

    def __call__(self, op):
        return op.reference() * self.factor


WRONG, SILENT, HONEST = Multiplying(factor=1.005), Multiplying(refuses=" "), Multiplying(refuses="too odd")


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "multiplying", sys.modules[__name__])
    declared = [
        selection.reference(Product),
        *(
            KernelImplementation(name=n.lower(), op=Product.path(), load=f"multiplying:{n}")
            for n in ("WRONG", "SILENT", "HONEST")
        ),
    ]
    monkeypatch.setattr(selection, "installed", lambda op: declared)

    def suite(name, **factors):
        def multiply(kernel, x):
            return Product(x, **factors).run(kernel)

        case = Case(name="one", run=multiply, operands=(jnp.arange(9.0).reshape(3, 3),))
        return type("S", (KernelSuite,), {"op": Product, "name": name, "cases": [case]})(), case

    return suite


def test_kernels(kernel):
    suite, case = kernel("xla")
    suite.test_values_and_gradients_are_those_of_the_reference(case)
    suite.test_it_supports_one_of_the_cases()
    suite, case = kernel("wrong")
    with pytest.raises(AssertionError, match="differs by"):
        suite.test_values_and_gradients_are_those_of_the_reference(case)
    suite, case = kernel("silent")
    with pytest.raises(AssertionError, match="says why not"):
        suite.test_a_refusal_has_a_reason_and_is_kept(case)
    suite, case = kernel("honest")
    suite.test_a_refusal_has_a_reason_and_is_kept(case)
    with pytest.raises(AssertionError, match="refuses every case"):
        suite.test_it_supports_one_of_the_cases()


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.01])
@pytest.mark.parametrize("figure", ["flops", "bytes"])
def test_figures_of_an_op_are_held_against_its_reference(kernel, figure, factor):
    suite, case = kernel("xla")
    suite.test_the_op_says_what_it_multiplies_and_moves(case)
    suite, case = kernel("xla", **{f"{figure}_factor": factor})
    with pytest.raises(AssertionError, match=rf"product\.{figure}\(\) is"):
        suite.test_the_op_says_what_it_multiplies_and_moves(case)


GROWING = '''
from axlearn_core.config import node, patch
from axlearn_core.plugins.feature import Feature

@node
class Growing(Feature):
    """Adds a step each time."""
    def apply(self, cfg):
        return patch(cfg, {"max_steps": cfg.max_steps + 1})

@node
class Doubling(Feature):
    """Doubles them."""
    def apply(self, cfg):
        return patch(cfg, {"seed": cfg.seed + 1, "log_every_steps": cfg.seed + 1})

@node
class Silent(Feature):
    def apply(self, cfg):
        return patch(cfg, {"seed": 7})
    def in_effect(self, cfg):
        return cfg.seed == 7
'''


@pytest.fixture
def growing(install, toy):
    install(
        "axlearn-plugins-growing",
        modules={"growing": GROWING, "growing_root": ROOT},
        points={
            "features": {n.lower(): f"growing:{n}" for n in ("Growing", "Doubling", "Silent")},
            "components": {"growing-root": "growing_root:Root"},
            "experiments": {"small": "growing_root:small"},
        },
    )
    return lambda name, **more: type("S", (FeatureSuite,), {"name": name, "experiments": ("small",), **more})()


ROOT = """
from axlearn_core.config import Configurable, node

class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        max_steps: int = 1
        seed: int = 0
        log_every_steps: int = 1

def small():
    return Root.Config()
"""


def test_features(growing):
    def suite(name, **more):
        made = growing(name, **more)
        made.setup_method()
        return made

    with pytest.raises(AssertionError, match="applied again it changes more"):
        suite("growing").test_twice_is_once_on_every_experiment()
    with pytest.raises(AssertionError, match="has none"):
        suite("silent").test_its_docstring_says_what_it_does()
    suite("silent").test_twice_is_once_on_every_experiment()
    suite("silent", others=("growing",)).test_the_order_with_any_other_feature_makes_no_difference()


class Off(Numbers):
    """Continues one batch too late."""

    def set_state(self, state):
        self.at = state + 1


class OffInput(Configurable):
    @node
    class Config(Configurable.Config["OffInput"]):
        kind: str = ""

    def __init__(self, cfg: Config, *, seed: int):
        self.kind, self.seed = cfg.kind, seed

    def train(self):
        made = (Off if self.kind == "state" else Numbers)()
        made.at = 0 if self.kind == "seed" else 100 * self.seed
        return made

    def evaluation(self):
        return Numbers(None if self.kind == "endless" else 2)

    def describe(self):
        return {"a": {1, 2}} if self.kind == "describe" else {}


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        ("state", "test_a_state_continues_exactly"),
        ("seed", "test_equal_seeds_give_equal_streams"),
        ("endless", "test_evaluation_repeats"),
        ("describe", "test_it_describes_itself_for_the_lock"),
    ],
)
def test_inputs(kind, test):
    made = lambda kind: type("S", (InputSuite,), {"config": OffInput.Config(kind=kind)})()  # noqa: E731
    getattr(made(""), test)()
    with pytest.raises((AssertionError, TypeError)):
        getattr(made(kind), test)()


class Careless(Learner):
    """Takes what is not finite, shares buffers, forgets the weights of microbatches."""

    def init(self, params):
        return super().init(params)._replace(ema=dict(params))

    def value_and_grad(self, loss, params, variables, batch, key=None):
        return super().value_and_grad(loss, params, variables, {k: v[:4] for k, v in batch.items()}, key)

    def update(self, grads, state, params, loss):
        new = {p: x - 0.1 * grads[p] for p, x in params.items()}
        return new, state, {}


@pytest.mark.parametrize(
    ("test", "args"),
    [
        ("test_what_is_not_finite_changes_nothing", ((np.nan, 0),)),
        ("test_state_and_parameters_can_be_donated", ()),
        ("test_a_batch_in_microbatches_is_the_batch", ()),
    ],
)
def test_learners(test, args):
    with pytest.raises(AssertionError):
        getattr(type("S", (LearnerSuite,), {"config": Careless.Config()})(), test)(*args)


class Loud(Configurable):
    def __init__(self, cfg, *, run_dir):
        self.steps = []

    def start(self, info):
        print("starting")

    def log(self, step, values):
        self.steps.append(step)

    def text(self, step, name, value):
        pass

    def close(self):
        pass


def test_trackers(tmp_path, capfd):
    suite = type("S", (TrackerSuite,), {"config": Loud.Config(), "read": staticmethod(lambda run_dir: [])})()
    with pytest.raises(AssertionError, match="standard output is for results"):
        suite.test_it_takes_a_whole_run(tmp_path, capfd)
    with pytest.raises(AssertionError):
        suite.test_what_was_logged_is_there_after_closing(tmp_path)


class Forgetful(TrainLoop):
    """Saves nothing at the end."""

    def run(self, session):
        session.checkpointer.save = lambda *args, **kwargs: True
        super().run(session)


def test_loops(tmp_path):
    suite = type("S", (TrainerSuite,), {"config": Forgetful.Config()})()
    with pytest.raises(AssertionError, match="saves when due"):
        suite.test_it_goes_to_the_last_step_and_keeps_it(tmp_path)


class Trusting(Configurable):
    """A checkpointer that keeps numpy files and checks nothing."""

    def __init__(self, cfg, *, directory):
        self.directory, self.files = Path(directory), {}

    def due(self, step):
        return True

    def save(self, step, state, *, extra, metrics):
        self.directory.mkdir(parents=True, exist_ok=True)
        leaves = {str(i): np.asarray(x, np.float32) for i, x in enumerate(jax.tree.leaves(state))}
        np.savez(self.directory / f"{step}.npz", **leaves)
        return True

    def steps(self):
        return [int(p.stem) for p in sorted(self.directory.glob("*.npz"))]

    def latest_step(self):
        return max(self.steps(), default=None)

    def restore(self, step, like):
        flat, tree = jax.tree.flatten(like)
        found = np.load(self.directory / f"{step}.npz")
        return tree.unflatten([jnp.asarray(found[str(i)], x.dtype) for i, x in enumerate(flat)]), {"step": step}

    def wait(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    "test",
    [
        "test_what_is_restored_is_what_was_saved",
        "test_steps_are_listed_oldest_first",
        "test_text_files_are_kept_inside",
        "test_another_model_and_a_missing_step_are_refused",
    ],
)
def test_checkpointers(test, tmp_path):
    with pytest.raises((KeyError, FileNotFoundError, *FAILS)):
        getattr(type("S", (CheckpointerSuite,), {"config": Trusting.Config()})(), test)(tmp_path)


class Whole(LocalStorage):
    def read_into(self, path, begin, buffer):
        data = self.read(path)[begin : begin + len(buffer)]
        buffer[: len(data)] = data  # a file that ends early goes unnoticed


class Plain(LocalStorage):
    def write(self, path, chunks):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:  # in place: a reader sees half of it
            for chunk in chunks:
                opened.write(chunk)


class Merging(LocalStorage):
    def commit(self, source, target):
        for file in self.list(f"{source}/"):  # one after the other, over what there is
            self.write(f"{target}/{file.path.removeprefix(source + '/')}", [self.read(file.path)])
        self.delete(source)


class Prefixes(LocalStorage):
    def delete(self, path):
        for file in self.list(path):  # "ab" goes with "a"
            super().delete(file.path)


class Unsorted(LocalStorage):
    def list(self, prefix=""):
        return super().list(prefix)[::-1]


class Untyped(LocalStorage):
    def read(self, path):
        return (self.root / path).read_bytes()


@pytest.mark.parametrize(
    ("planted", "test"),
    [
        (Whole, "test_a_file_that_ends_early_is_an_error"),
        (Plain, "test_a_write_that_fails_leaves_what_was_there"),
        (Merging, "test_a_commit_moves_all_files_at_once"),
        (Prefixes, "test_deleting_is_done_once"),
        (Unsorted, "test_files_are_listed_by_prefix_with_their_sizes"),
        (Untyped, "test_an_empty_storage_has_no_files"),
    ],
)
def test_storages(planted, test, tmp_path):
    suite = type("S", (StorageSuite,), {"uri": "{tmp}/there", "storage": lambda self, uri: planted(uri)})()
    with pytest.raises((FileNotFoundError, *FAILS)):
        getattr(suite, test)(tmp_path)
