"""Features x layouts x experiments: a pairwise covering set builds and steps, at toy size.

Each layout meets each experiment once, with as many features at a time as go together, chosen so that every feature meets
every layout and every experiment, and every two features that go together meet each other. Pairs that find no place there,
since one of them does not go with what is chosen already, meet on one more layout. What does not go together refuses where
the config is made, which is tested elsewhere.
"""

import functools
import itertools
import os
import random
import time

import jax
import numpy as np
import pytest

from axlearn_core.compose import compose
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh
from support import toy_models

LAYOUTS = {
    "one": {"fsdp": 1},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "experts": {"expert": 4, "seq": 2},
}
MORE = {**LAYOUTS, "fsdp": {"fsdp": 8}, "tensor": {"data": 2, "tensor": 4}}
ROWS = list(itertools.product((*LAYOUTS, "fsdp"), toy_models.experiments()))
MOST = 8  # features at a time


@pytest.fixture(scope="module")
def plan():
    """(layout, experiment) -> the features that it is tried with."""
    return cover()[0]


@functools.cache
def cover():
    """The features of each row, and the pairs that go together and that no row covers."""
    names = toy_models.features()
    together = {
        (e, *p) for e in toy_models.experiments() for p in itertools.combinations(names, 2) if toy_models.fits(e, *p)
    }
    missing = {(n, x) for n in names for x in (*LAYOUTS, *toy_models.experiments())} | {(a, b) for _, a, b in together}
    rows = dict.fromkeys(ROWS, ())

    def put(row, more):
        """Adds features, if they go with those of the row."""
        chosen = tuple(n for n in names if n in more or n in rows[row])  # in the order in which pairs were tried
        if len(chosen) > 2 * MOST or not toy_models.fits(row[1], *chosen):
            return False
        rows[row] = chosen
        missing.difference_update(covered(row, chosen))
        return True

    def room(pair):
        """The rows that may have room for a pair."""
        added = [n for n in pair if n in names]
        return [
            row
            for row in ROWS
            if set(pair) <= {*row, *names} and all(n in rows[row] or _joins(row, rows[row], n, together) for n in added)
        ]

    for row in ROWS:
        while row[0] in LAYOUTS and len(rows[row]) < MOST:
            gains = {n: _gain(row, rows[row], n, missing) for n in names if _joins(row, rows[row], n, together)}
            best = max(gains, key=gains.get, default=None)
            if best is None or not gains[best] or not put(row, (best,)):
                break
    # Place the pairs that the first pass did not cover, starting with those that fit into the fewest rows.
    left = set(missing)
    while left:
        pair = min(sorted(left), key=lambda p: len(room(p)))
        any(put(row, pair) for row in room(pair))
        left = (left - {pair}) & missing
    return rows, missing


def _gain(row, current, name, missing):
    # A layout and an experiment meet in one row only, two features in any: the scarce come first.
    new = covered(row, (*current, name)) & missing
    return sum(1 if set(pair) & {*current} else 8 for pair in new)


def _joins(row, current, name, together):
    return name not in current and all((row[1], min(name, c), max(name, c)) in together for c in current)


def covered(row, current):
    """The pairs that a row covers."""
    return set(itertools.combinations(sorted(current), 2)) | {(n, x) for n in current for x in row}


def step(layout, experiment, names, *, init=False):
    """Builds the program, and takes one step that is as it should be; from its own initial state, or from any."""
    cfg = patch(toy_models.config(experiment, *names), {"mesh": Mesh(shape=MORE[layout])})
    count = int(np.prod(list(MORE[layout].values())))
    program = compose(cfg, jax.devices()[:count])
    batch = program.put(toy_models.batch_for(cfg))
    state = program.init(0) if init else any_state(program)
    before = jax.device_get(state.params)
    state, scalars = program.train_step(state, batch)
    details = f"{experiment} on {layout} with {', '.join(names)}"
    assert np.isfinite(float(scalars["loss"])), details
    assert int(state.step) == 1, details
    after = jax.device_get(state.params)
    assert any(np.any(before[p] != after[p]) for p in before), f"{details}: the step changed no parameter"
    params = program.state.params
    assert all(state.params[p].sharding.is_equivalent_to(s.sharding, s.ndim) for p, s in params.items()), details


def any_state(program):
    """A state of its shapes and places, without compiling its initialisation: random parameters, the rest zero."""
    state = jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), program.state)
    params = program.state.params
    filled = {p: jax.device_put(x, params[p].sharding) for p, x in toy_models.filled(program.functional).items()}
    return state.replace(params=filled)


@pytest.fixture(autouse=True)
def quick():
    """Most of the time would go into optimizing what runs once."""
    with toy_models.quick_to_compile():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "experiment"), ROWS)
def test_it_builds_and_steps(layout, experiment, plan):
    step(layout, experiment, plan[layout, experiment])


@pytest.mark.slow
def test_the_set_covers_every_pair(plan):
    names, missing = toy_models.features(), cover()[1]
    met = set().union(*(covered(row, chosen) for row, chosen in plan.items()))
    assert {(n, layout) for n in names for layout in LAYOUTS} <= met
    assert {(n, e) for n in names for e in toy_models.experiments() if toy_models.fits(e, n)} <= met
    assert not missing, f"features that go together and never meet: {sorted(missing)}"


@pytest.mark.exhaustive
def test_all_of_them():
    """Every feature on every layout and experiment, in random order, for a minute (or as the variable says)."""
    end = time.monotonic() + float(os.environ.get("AXLEARN_COMPOSITION_SECONDS", "60"))
    cases = list(itertools.product(MORE, toy_models.experiments(), toy_models.features()))
    random.Random(int(os.environ.get("AXLEARN_COMPOSITION_SEED", "0"))).shuffle(cases)
    count = 0
    for layout, experiment, name in cases:
        step(layout, experiment, (name,), init=True)
        count += 1
        if count >= 10 and time.monotonic() > end:
            break
    print(f"{count} of {len(cases)}")
