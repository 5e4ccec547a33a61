import pytest

from axlearn_plugins_rl.process_share import ProcessShare


@pytest.mark.parametrize(("size", "counts"), [(8, [3, 3, 2]), (9, [3, 3, 3]), (2, [1, 1, 0]), (0, [0, 0, 0])])
def test_shares_are_consecutive_and_as_equal_as_possible(size, counts):
    shares = [ProcessShare(index, 3) for index in range(3)]
    items = [*range(size)]
    parts = [items[share.select(size)] for share in shares]
    assert [len(part) for part in parts] == counts == shares[0].counts(size)
    assert [item for part in parts for item in part] == items


def test_shares_of_given_sizes_follow_each_other():
    parts = ["abcdef"[ProcessShare(index, 3).select_counts([1, 0, 4])] for index in range(3)]
    assert parts == ["a", "", "bcde"]


def test_one_process_has_everything():
    assert [*range(5)][ProcessShare().select(5)] == [*range(5)]
