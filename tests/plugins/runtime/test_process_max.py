"""The largest values of a job of one process. `test_stops.py` and the tests of the local tier have more."""

from axlearn_plugins_runtime.process_max import max_over_processes


def test_values_of_one_process_are_returned():
    assert max_over_processes([3]) == [3]
    assert max_over_processes([-7, 0, 2**31 - 1]) == [-7, 0, 2**31 - 1]
