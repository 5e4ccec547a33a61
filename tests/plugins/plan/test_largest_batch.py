"""The search for the largest batch that fits, on memory that is computed instead of compiled."""

import pytest

from axlearn_plugins_plan.largest_batch import MAX_COMPILES, find_largest_batch
from axlearn_plugins_plan.memory import Memory

CAPACITY = 80_000


def search(rows, memory_of, unit=1, **options):
    """Search from a batch of `rows` rows. Return the result and the batches that were measured."""
    measured = []

    def memory(count):
        return Memory(arguments=0, temporaries=int(memory_of(count)), capacity=CAPACITY)

    def measure(count):
        measured.append(count)
        return memory(count)

    return find_largest_batch(rows, unit, memory(rows), measure, **options), measured


@pytest.mark.parametrize("rows", [1024, 40, 7, 1])
@pytest.mark.parametrize(
    ("name", "memory_of"),
    [
        ("linear", lambda rows: 30_000 + 9_000 * rows),
        ("fixed minimum", lambda rows: max(60_000, 9_000 * rows)),
        ("convex", lambda rows: 20_000 + 5_000 * rows**1.2),
        ("fits always", lambda rows: 10 + rows),
    ],
)
def test_the_result_fits_and_is_close_to_the_largest(rows, name, memory_of):
    result, measured = search(rows, memory_of)
    assert result.compiles == len(measured) <= MAX_COMPILES
    assert len(set(measured)) == len(measured)
    assert result.rows is not None
    assert memory_of(result.rows) <= CAPACITY
    assert result.bytes == int(memory_of(result.rows))
    if result.too_large is None:
        assert name == "fits always"
    else:
        assert memory_of(result.too_large) > CAPACITY
        assert result.too_large - result.rows <= max(1, result.rows // 16)


def test_linear_memory_takes_few_compilations():
    result, measured = search(1024, lambda rows: 30_000 + 9_000 * rows)
    assert (result.rows, result.too_large) == (5, 6)
    assert measured == [1, 5, 6]


def test_only_batches_that_the_mesh_divides_are_tried():
    result, measured = search(1024, lambda rows: 30_000 + 900 * rows, unit=16)
    assert result.rows == 48
    assert all(count % 16 == 0 for count in measured)


def test_nothing_fits():
    result, measured = search(64, lambda rows: 90_000 + rows, unit=8)
    assert (result.rows, result.bytes, result.too_large) == (None, None, 8)
    assert measured == [8]
    result, measured = search(8, lambda rows: 90_000 + rows, unit=8)
    assert (result.rows, result.too_large, measured) == (None, 8, [])


def test_the_number_of_compilations_is_bounded():
    steps = {count: 70_000 + count for count in range(1, 600)}  # jumps far above the line
    result, measured = search(1024, lambda rows: steps.get(rows, 10**9), max_compiles=4)
    assert len(measured) == 4
    assert result.rows in steps
    assert result.too_large not in steps
