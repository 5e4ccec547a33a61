"""Several processes as one job, over jax.distributed on loopback."""

import re
import signal
from importlib.metadata import version

import pytest

from support import cli_runs
from support.cli_jobs import finish, start, together


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_and_continue(tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    cli_runs.axlearn(*cli_runs.arguments(alone, steps=6))
    together(cli_runs.arguments(shared, steps=4))
    together(cli_runs.arguments(shared, steps=6))
    assert [s for s, _ in cli_runs.losses(shared)] == [1, 2, 3, 4, 5, 6]
    for (step, loss), (_, expected) in zip(cli_runs.losses(shared), cli_runs.losses(alone), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_of_them_at_one_step(tmp_path):
    run = tmp_path / "run"
    settings = ("log_every_steps=2", "checkpointer.every_steps=1000")
    processes = start(cli_runs.arguments(run, steps=100_000, settings=settings))
    assert cli_runs.kill_when(processes[1], lambda: len(cli_runs.metrics(run)) > 2, signal.SIGINT)
    finish(processes, 128 + signal.SIGINT)
    (saved,) = sorted((run / "checkpoints").iterdir())
    assert int(saved.name) % 2 == 0
    assert cli_runs.metrics(run)[-1]["step"] == int(saved.name)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_preempted_process_stops_all_of_them_at_the_next_step(tmp_path, rank):
    run = tmp_path / "run"
    settings = ("log_every_steps=1000000", "checkpointer.every_steps=5")
    processes = start(cli_runs.arguments(run, steps=100_000, settings=settings))
    assert cli_runs.kill_when(processes[rank], lambda: any((run / "checkpoints").glob("[0-9]*")), signal.SIGTERM)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, errors
    assert "received SIGTERM: saving and stopping" in errors[0]
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    assert steps[-1] < 1000
    together(cli_runs.arguments(run, steps=steps[-1] + 2, settings=settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("seed=7", "config.seed: 0 on process 0, 7 on process 1"),
        ("checkpointer.every_steps=4", "config.checkpointer.every_steps: 3 on process 0, 4 on process 1"),
    ],
)
def test_processes_with_another_config_are_all_refused(tmp_path, setting, difference):
    run = tmp_path / "run"
    processes = start(cli_runs.arguments(run, steps=4), other=cli_runs.arguments(run, steps=4, settings=(setting,)))
    for text in finish(processes, 2):
        assert "1 of 2 processes of this job differ from process 0 in their config and versions" in text
        assert difference in text
        assert "fix: start every process with the same command" in text
    assert not run.exists()


@pytest.mark.slow
def test_processes_with_another_version_are_all_refused(tmp_path):
    """The last one finds an optax of its own, as on a machine whose environment is older."""
    run, older = tmp_path / "run", tmp_path / "older"
    (older / "optax-0.0.1.dist-info").mkdir(parents=True)
    (older / "optax-0.0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
    processes = start(cli_runs.arguments(run, steps=4), other_env={"PYTHONPATH": str(older)})
    for text in finish(processes, 2):
        assert "1 of 2 processes of this job differ from process 0 in their config and versions" in text
        assert f"versions.optax: {version('optax')} on process 0, 0.0.1 on process 1" in text
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["other content", "another file more"])
def test_processes_with_other_data_are_all_refused(tmp_path, change):
    """Each machine has a copy of the files under the same name."""
    run = tmp_path / "run"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "corpus.txt").write_text("one two three four five six seven\n" * 400)
    if change == "other content":
        (folders[1] / "corpus.txt").write_text("one two three four five six eight\n" * 400)
    else:
        (folders[1] / "more.txt").write_text("and more\n" * 400)
    settings = ("input.source={type: files, paths: '*.txt', validation_fraction: 0.1}",)
    arguments = cli_runs.arguments(run, steps=4, settings=settings)
    processes = start(arguments, folders=folders)
    for text in finish(processes, 2):
        assert "1 of 2 processes of this job differ from process 0 in their data" in text
        assert "data." in text
    assert not (run / "checkpoints").exists()
    finish(start(arguments, folders=[folders[0]] * 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "features"),
    [
        ("{pipeline: 2, tensor: 2}", ("--with", "pipeline:microbatches=2")),  # both processes need all rows
        ("{seq: 4}", ("--with", "context-parallel")),  # and here all rows, but half of each
        ("{expert: 4}", ("--with", "moe:num_experts=4", "--with", "expert-parallel")),
    ],
    ids=["pipeline", "ring", "experts"],
)
def test_axes_across_processes_give_the_losses_of_one_device(tmp_path, shape, features):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    cli_runs.axlearn(*cli_runs.arguments(alone, steps=2, more=features))
    together(cli_runs.arguments(shared, steps=2, more=features, settings=(f"mesh.shape={shape}",)), devices=2)
    for (step, loss), (_, expected) in zip(cli_runs.losses(shared), cli_runs.losses(alone), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_all_come_end_with_one_line(tmp_path, rank):
    words = cli_runs.arguments(tmp_path / "run", steps=1, settings=("distributed.join_seconds=2",))
    processes = start(words)
    processes[1 - rank].kill()
    processes[1 - rank].communicate(timeout=60)
    errors = processes[rank].communicate(timeout=120)[1]
    assert processes[rank].returncode == 74, errors
    assert re.search(
        r"error: not all processes of this job joined 127.0.0.1:\d+ within 2 s \(distributed.join_seconds\)", errors
    )
    assert "fix: find out why a process ended" in errors
    assert "Traceback" not in errors
    assert "Check failure" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_one_line(tmp_path, rank):
    run = tmp_path / "run"
    # Checkpoints that stay, and fewer lines than a pipe holds that nobody reads.
    settings = ("checkpointer.keep_last=null", "log_every_steps=5")
    processes = start(cli_runs.arguments(run, steps=100_000, settings=settings))
    saved = run / "checkpoints" / "30"
    # Some steps later, so that the other process knows of a checkpoint: it is told of new ones once a second.
    assert cli_runs.kill_when(processes[rank], lambda: saved.exists() and len(cli_runs.logged(run)) > 12)
    processes[rank].communicate(timeout=60)
    errors = processes[1 - rank].communicate(timeout=300)[1]
    (line,) = [text for text in errors.splitlines() if text.startswith("error: process ")]
    assert f"process {rank} " in line
    says = "has sent no heartbeat since" if rank else "process 1 lost its connection to process 0 at 127.0.0.1:"
    assert says in line
    assert re.search(r"\d\d:\d\d:\d\d UTC", line)
    assert re.search(rf"newest checkpoint: step \d+ of {run}; to resume: `axlearn train quickstart ", line)
