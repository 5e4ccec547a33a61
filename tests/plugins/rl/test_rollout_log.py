import pytest

from axlearn_core.errors import WorkError
from axlearn_plugins_rl.rollout_log import RolloutLog, WriteDuringStep, list_steps
from axlearn_plugins_rl.rollout_records import read_rollouts
from support.rollout_groups import group


def log(run_dir, step=0, **options):
    instance = RolloutLog.Config(**options).build()
    instance.start(run_dir, step)
    return instance


def test_a_file_has_the_rollouts_of_its_step(tmp_path):
    log(tmp_path).write(3, [group((1.0, 0.5))])
    (read,) = read_rollouts(tmp_path / "rollouts" / "step-3.jsonl")
    assert [r.text for r in read.rollouts] == ["0", "1"]
    assert [s.value for s in read.scores] == [1.0, 0.5]
    assert read.rollouts[0].trajectories[0][1].tokens.tolist() == [48, 256]


def test_only_the_newest_files_are_kept(tmp_path):
    files = log(tmp_path, every_steps=2, max_files=2)
    for step in range(1, 10):
        files.write(step, [group()])
    assert [*list_steps(tmp_path)] == [6, 8]


def test_no_files_are_written_if_the_interval_is_0(tmp_path):
    log(tmp_path, every_steps=0).write(1, [group()])
    assert not list_steps(tmp_path)


def test_a_resumed_run_deletes_the_files_of_later_steps(tmp_path):
    files = log(tmp_path)
    for step in range(1, 5):
        files.write(step, [group()])
    log(tmp_path, step=2)
    assert [*list_steps(tmp_path)] == [1, 2]


def test_a_new_run_sets_existing_files_aside(tmp_path):
    log(tmp_path).write(1, [group()])
    log(tmp_path)
    assert not list_steps(tmp_path)
    (old,) = tmp_path.glob("rollouts.superseded-*/step-1.jsonl")
    assert read_rollouts(old)


def process_log(run_dir, process, step=0):
    instance = RolloutLog.Config().build()
    instance.start(run_dir, step, process)
    return instance


def write_files(run_dir, processes=2, steps=3):
    for process in range(processes):
        files = process_log(run_dir, process)
        for step in range(1, steps + 1):
            files.write(step, [group(number=process)])


def names(run_dir):
    return {step: [path.name for path in paths] for step, paths in list_steps(run_dir).items()}


def test_each_process_writes_a_file_and_one_name_reads_them_all(tmp_path):
    write_files(tmp_path, processes=11, steps=1)
    others = [f"step-1.process-{process}.jsonl" for process in range(1, 11)]
    assert names(tmp_path) == {1: ["step-1.jsonl", *others]}
    groups = read_rollouts(tmp_path / "rollouts" / "step-1.jsonl")
    assert sorted(int(g.example.id) for g in groups) == [*range(11)]
    (alone,) = read_rollouts(tmp_path / "rollouts" / "step-1.process-7.jsonl")
    assert alone.example.id == "7"


def test_process_0_deletes_the_files_of_later_steps_of_all_processes(tmp_path):
    write_files(tmp_path)
    process_log(tmp_path, 0, step=1)
    assert names(tmp_path) == {1: ["step-1.jsonl", "step-1.process-1.jsonl"]}


def test_process_0_sets_the_files_of_all_processes_aside(tmp_path):
    write_files(tmp_path, steps=1)
    process_log(tmp_path, 0)
    assert names(tmp_path) == {}
    assert len([*tmp_path.glob("rollouts.superseded-*/*")]) == 2


def test_another_process_only_changes_its_own_files(tmp_path):
    write_files(tmp_path, steps=2)
    process_log(tmp_path, 1, step=1)
    assert names(tmp_path) == {1: ["step-1.jsonl", "step-1.process-1.jsonl"], 2: ["step-2.jsonl"]}
    process_log(tmp_path, 1)
    assert names(tmp_path) == {1: ["step-1.jsonl"], 2: ["step-2.jsonl"]}


def test_rollouts_are_written_when_their_step_is_dispatched(tmp_path):
    files = WriteDuringStep(log(tmp_path))
    files.hold(1, [group()])
    assert not list_steps(tmp_path)
    files.step_dispatched(1, {})
    files.step_dispatched(2, {})
    assert [*list_steps(tmp_path)] == [1]
    files.check()


def test_an_error_of_a_write_is_raised_once_at_the_next_check(tmp_path):
    files = WriteDuringStep(log(tmp_path))
    (tmp_path / "rollouts").write_text("a file in place of the folder")
    files.hold(1, [group()])
    files.step_dispatched(1, {})
    with pytest.raises(WorkError, match="rollouts"):
        files.check()
    files.check()
