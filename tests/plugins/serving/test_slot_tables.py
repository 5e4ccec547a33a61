import jax
import numpy as np
import pytest

from axlearn_plugins_serving.contracts import Sampling
from axlearn_plugins_serving.slot_tables import PLAIN_COLUMNS, SlotTables, assign_plain_rows, pack_plain_row
from axlearn_plugins_serving.token_sampling import Tables, table_row

SLOTS, VOCABULARY = 4, 40


def used_tables():
    """Return tables whose values all differ from the initial ones."""
    return jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), Tables.init(SLOTS, VOCABULARY))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    ],
)
def test_a_plain_row_has_the_values_of_a_whole_row(sampling):
    seed = 2**32 - 3
    packed = np.full((SLOTS, PLAIN_COLUMNS), SLOTS, np.int32)
    packed[0] = pack_plain_row(2, sampling, seed, VOCABULARY, 1)
    expected = jax.tree.map(lambda x: x.copy(), used_tables())
    row = table_row(sampling, seed, (), VOCABULARY, 1)
    jax.tree.map(lambda table, value: table.__setitem__(2, value), expected, row)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(assign_plain_rows)(used_tables(), packed), expected)


class RecordingProgram:
    """A program that runs the functions of the tables, and records the names of the calls."""

    def __init__(self):
        self.calls = []

    def compile(self, name):
        functions = {
            "serve_tables": lambda: Tables.init(SLOTS, VOCABULARY),
            "serve_assign": lambda tables, slot, row: jax.tree.map(lambda x, v: x.at[slot].set(v), tables, row),
            "serve_assign_plain": assign_plain_rows,
        }
        self.calls.append(name)
        return functions[name]


def test_plain_requests_are_assigned_in_one_call():
    tables = SlotTables(program := RecordingProgram(), SLOTS, VOCABULARY)
    for slot in range(SLOTS):
        tables.assign(slot, Sampling(), 10 + slot, (), 0, (1,))
    tables.prepare([])
    tables.prepare([])
    assert program.calls == ["serve_tables", "serve_assign_plain"]
    assert tables.arrays.seed.tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("sampling", "output"),
    [(Sampling(logit_bias={3: 1.0}), ()), (Sampling(presence_penalty=0.5), ()), (Sampling(), (5,))],
)
def test_other_requests_are_assigned_one_by_one(sampling, output):
    tables = SlotTables(program := RecordingProgram(), SLOTS, VOCABULARY)
    tables.assign(1, Sampling(), 3, (), 0, (1,))  # another request takes the slot before the next step
    tables.assign(1, sampling, 4, output, 0, (1,))
    tables.prepare([])
    assert program.calls == ["serve_tables", "serve_assign"]
    assert tables.arrays.seed[1] == 4
