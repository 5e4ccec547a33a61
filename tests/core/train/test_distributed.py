"""Merging the states of processes. `tests/e2e/test_processes.py` gathers them in real jobs."""

from axlearn_core.train.distributed import _merge


def test_mappings_are_merged_by_key_and_other_values_come_from_process_0():
    states = [
        {"position": 3, "files": {"a": [1]}, "seed": {"x": 1}},
        {"position": 4, "files": {"b": [2]}, "seed": 7},
        {"files": {"a": [9], "c": {"d": None}}},
    ]
    assert _merge(states) == {"position": 3, "files": {"a": [1], "b": [2], "c": {"d": None}}, "seed": {"x": 1}}
    assert _merge([5, 6]) == 5


def test_the_work_of_a_merge_is_linear_in_the_number_of_processes():
    class Counted(dict):
        reads = 0

        def items(self):
            Counted.reads += 1
            return super().items()

    states = [{"buffers": Counted({str(process): process})} for process in range(100)]
    assert len(_merge(states)["buffers"]) == 100
    assert Counted.reads == 100
