"""Random meshes x features x dtypes: eight virtual devices give the loss and the gradients of one.

The features come from their entry points. What is allowed between the two is measured, not chosen: gradients of one device
whose parameters are moved by as much as the dtype rounds. A quantized or routed model jumps where a value crosses a
boundary, and it does so there too.
"""

import itertools
import os
import random
import time

import jax
import numpy as np
import pytest

from axlearn_core.compose import ModelWeights, compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.learn import without_state
from support import toy_models
from support.parallelisms import PARALLELISMS, together

QUICK = {"xla_backend_optimization_level": 0}  # most of the time would go into compiling
AXES = ("data", "fsdp", "expert", "seq", "tensor")
FLOOR = {"float32": 2e-5, "bfloat16": 1e-2}
"""The least that is allowed, relative to the norm of the gradients; rounding alone makes as much."""
EPSILON = {"float32": 2.0**-22, "bfloat16": 2.0**-8}


def case(seed):
    """(experiment, features, dtype, mesh shape): the seed chooses all of them, and the first feature in turn."""
    rng = random.Random(seed)
    names, experiments = toy_models.features(), toy_models.experiments()
    experiment = experiments[(seed + seed // len(names)) % len(experiments)]
    choice = [random.Random(1).sample(names, len(names))[seed % len(names)]]
    for other in rng.sample(names, len(names)):
        if other not in choice and len(choice) < 3 and toy_models.fits(experiment, *choice, other):
            choice.append(other)
    shape = dict.fromkeys(AXES, 1)
    for _ in range(3):
        shape[rng.choice(AXES)] *= 2
    return experiment, tuple(choice), ("float32", "bfloat16")[seed % 2], {k: v for k, v in shape.items() if v > 1}


def gradients(cfg, devices, moved=()):
    """[(loss, gradients by path)] on these devices: of the parameters as they are, then moved by each random amount."""
    program = compose(cfg, devices)
    trained = program.trained
    learner = cfg.learner.build(max_steps=cfg.max_steps, axes=trained.axes)
    layout = program.layout
    params, axes = toy_models.filled(trained), trained.axes
    # Of frozen models: they stay as they are, wherever the parameters are moved.
    specs, result = trained.variables, program.state.variables
    frozen_params = {
        p: jax.device_put(toy_models.filled_one(f"frozen {p}", s), result[p].sharding) for p, s in specs.items()
    }
    places = {p: layout.sharding(axes[p], x.shape, p) for p, x in params.items()}

    def run(params, frozen, batch):
        with program.tracing("train"):
            loss = without_state(lambda p, b: program.function("loss").call(ModelWeights(p, frozen), b))
            return learner.value_and_grad(loss, params, {}, batch, None)

    outputs, results = jax.jit(run, compiler_options=QUICK), []
    for seed, amount in enumerate((0.0, *moved)):
        rng = np.random.default_rng(seed)
        near = {p: x + (amount * np.abs(x) * rng.normal(size=x.shape)).astype(x.dtype) for p, x in params.items()}
        weights = {p: jax.device_put(near[p], places[p]) for p in params}
        (loss, *_), grads = jax.device_get(outputs(weights, frozen_params, program.put(toy_models.batch_for(cfg))))
        results.append((float(loss), {p: np.asarray(g, np.float64) for p, g in grads.items()}))
    return results


def distance(one, other):
    """How far the gradients are apart, relative to their norm: of all together, and of the worst parameter.

    A parameter whose gradient is next to nothing is compared to a hundredth of what all have.
    """
    norm = np.sqrt(sum((g**2).sum() for g in one.values()))
    apart = {p: np.linalg.norm(one[p] - other[p]) for p in one}
    worst = max(apart[p] / (np.linalg.norm(one[p]) + 0.01 * norm) for p in one)
    return np.sqrt(sum(d**2 for d in apart.values())) / norm, worst


def agree(seed, dtype=None):
    """Runs a case, in its dtype or in this one; the message of a failure is how to run it again."""
    experiment, names, drawn, shape = case(seed)
    dtype = dtype or drawn
    # a dtype that a feature chose stays: patching comes first
    small = patch(toy_models.small(experiment), {"model.dtype": dtype, "model.param_dtype": "float32"})
    texts = list(dict.fromkeys(text for name in names for text in toy_models.use(name)))
    cfg = toy_models.resolve(small, with_=texts).config
    rounds = cfg.model.dtype if cfg.model.dtype in FLOOR else dtype
    alone = patch(cfg, {"mesh": Mesh(shape={"fsdp": 1}, rules=cfg.mesh.rules)})
    spread = patch(cfg, {"mesh": Mesh(shape=shape, rules=cfg.mesh.rules)})
    (loss, grads), *other_runs = gradients(alone, jax.devices()[:1], (EPSILON[rounds],) * 3)
    ((loss_there, grads_there),) = gradients(spread, jax.devices()[:8])
    allowed = [max(FLOOR[rounds], 4 * max(d)) for d in zip(*(distance(grads, g) for _, g in other_runs), strict=True)]
    near = max(FLOOR[rounds], 4 * max(abs(v / loss - 1) for v, _ in other_runs))
    details = f"seed {seed}: {experiment} with {', '.join(names)}, {dtype}, {shape}"
    assert np.isfinite(loss), details
    if max(allowed) >= 0.5 and rounds == dtype == "bfloat16":
        # A router that jumps so often in bfloat16 says nothing there: it has to agree exactly.
        return agree(seed, "float32")
    assert max(allowed) < 0.5, (
        f"{details}: rounding alone changes the gradients by {allowed}: nothing would be compared"
    )
    assert abs(loss_there / loss - 1) <= near, f"{details}: loss {loss_there}, on one device {loss}"
    apart = distance(grads, grads_there)
    assert apart[0] <= allowed[0], f"{details}: gradients are apart by {apart}, allowed {allowed}"
    assert apart[1] <= allowed[1], f"{details}: a gradient is apart by {apart}, allowed {allowed}"
    return None


@pytest.mark.parametrize("seed", range(1))
def test_a_mesh_gives_the_loss_and_the_gradients_of_one_device(seed):
    agree(seed)


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=pytest.mark.exhaustive if n else pytest.mark.slow) for n in range(4)]
)
def test_many_meshes(part):
    """As many cases as the time takes (40 seconds, or as the variable says), at least four."""
    end = time.monotonic() + float(os.environ.get("AXLEARN_MESH_SECONDS", "40"))
    for count, seed in enumerate(range(1 + part, 1000, 4)):
        if count >= 4 and time.monotonic() > end:
            break
        agree(seed)


def test_the_comparison_can_fail():
    one = {"a": np.ones(4), "b": np.full(4, 1e-3)}
    assert distance(one, one) == (0, 0)
    whole, worst = distance(one, {"a": one["a"], "b": -one["b"]})
    assert whole == pytest.approx(2e-3, rel=0.01)
    assert worst > 0.09, "a small gradient of the wrong sign is seen"


def test_every_feature_is_the_first_of_some_case():
    names = toy_models.features()
    assert {case(seed)[1][0] for seed in range(len(names))} == set(names)


EXACT = 1e-5
"""What is allowed in float32, of the loss and of each gradient, relative to its norm."""


def exact(*names, layers=2):
    """Parallelisms together give the loss and each gradient of one device, in float32."""
    difference = together(*names)
    assert difference is not None
    features, shape = difference
    small = patch(toy_models.small("quickstart"), {"model.decoder.num_layers": 4 if "interleaved" in names else layers})
    cfg = toy_models.resolve(small, with_=features).config
    rules = cfg.mesh.rules
    alone = patch(cfg, {"mesh": Mesh(shape={"fsdp": 1}, rules=rules)})
    spread = patch(cfg, {"mesh": Mesh(shape=shape, rules=rules)})
    ((loss, grads),) = gradients(alone, jax.devices()[:1])
    ((loss_there, grads_there),) = gradients(spread, jax.devices()[: int(np.prod(list(shape.values())))])
    assert abs(loss_there / loss - 1) <= EXACT, f"{names}: loss {loss_there}, on one device {loss}"
    apart = {p: np.linalg.norm(grads_there[p] - g) / np.linalg.norm(g) for p, g in grads.items()}
    far = {p: d for p, d in apart.items() if not d <= EXACT}
    assert not far, f"{names} on {shape}: gradients are apart by {far}"


@pytest.mark.slow
def test_parallelisms_together_are_exact():
    exact("pipeline", "ring", "sequence")


@pytest.mark.slow
@pytest.mark.parametrize("names", [("interleaved", "ring", "experts"), ("experts-sent", "fsdp", "data")], ids="-".join)
def test_more_of_them_together_are_exact(names):
    exact(*names)


PAIRS = [p for p in itertools.combinations(PARALLELISMS, 2) if together(*p) is not None]


SETS = [
    *(pytest.param((n,), marks=pytest.mark.slow) for n in PARALLELISMS),
    *(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in PAIRS),
]


@pytest.mark.parametrize("names", SETS, ids=lambda names: "-".join(names))
def test_every_parallelism_alone_and_in_pairs_is_exact(names):
    exact(*names)
