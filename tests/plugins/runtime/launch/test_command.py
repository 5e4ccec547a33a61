"""`axlearn launch` until processes would start: jobs, dry runs and errors."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.contracts.target import Machine, Target
from axlearn_core.errors import MissingFileError, RequestError, StorageError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_runtime.launch.agent import Agent, Setup
from axlearn_plugins_runtime.launch.check import check_hosts, make_job, reduced_words
from axlearn_plugins_runtime.launch.job import Job, parse_options
from axlearn_plugins_runtime.launch.journal import Journal
from axlearn_plugins_runtime.launch.local import LocalLauncher, LocalOptions
from axlearn_plugins_runtime.launch.ray import RayLauncher
from support import cli_runs

GPU = Target(name="h100", size="hosts", platform="gpu", chips_per_host=8)


def config(**settings):
    return resolve("quickstart", set={"max_steps": 3, **settings}).config


@pytest.mark.slow
def test_a_dry_run_prints_what_every_host_runs(tmp_path):
    words = ("--set", "seed=3", "--steps", "7", "--with", "watchdog", "--run-dir", str(tmp_path / "run"))
    result = cli_runs.axlearn(
        "launch", "quickstart", "--on", "local", "--hosts", "2", "--spares", "1", "--dry-run", *words
    )
    assert f"axlearn train quickstart --with watchdog --set seed=3 --steps 7 --run-dir {tmp_path}/run" in result.stdout
    assert f"JAX_COMPILATION_CACHE_DIR={tmp_path}/run/launch/compiled" in result.stdout
    assert not (tmp_path / "run").exists()


def test_every_option_reaches_the_job(monkeypatch, tmp_path):
    jobs = []

    def launch(self, job, *, dry_run):
        jobs.append((job, dry_run))
        return 0

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    options = ["--hosts", "2", "--spares", "1", "--processes-per-host", "2", "--name", "mine", "--env", "A=b"]
    options += ["--option", "hang-seconds=7", "--run-dir", str(tmp_path / "run"), "--dry-run"]
    passed_on = ["--with", "ema", "--without", "scan", "--set", "seed=3", "--steps", "7", "--target", "cpu-4"]
    result = CliRunner().invoke(cli, ["launch", "quickstart", "--on", "local", *options, *passed_on, "--allow-drift"])
    assert result.exit_code == 0, result.output
    ((job, dry_run),) = jobs
    assert (job.hosts, job.spares, job.processes_per_host, job.name) == (2, 1, 2, "mine")
    assert job.environment["A"] == "b"
    assert job.options.hang_seconds == 7
    assert dry_run
    words = " ".join(job.train_words())
    for pair in ("--with ema", "--without scan", "--set seed=3", "--steps 7", "--target cpu-4", "--allow-drift"):
        assert pair in words


def test_a_run_file_travels_with_the_job(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: quickstart\nset: {max_steps: 3}\n")
    job = make_job(str(file), {"set_": ["seed=1"]}, run_dir="s3://bucket/My Run", hosts=2)
    assert job.document == file.read_text()
    assert job.run_dir == "s3://bucket/My Run"
    assert job.name == "my-run"
    assert job.train_words("/there/run.yaml")[:4] == ("train", "/there/run.yaml", "--set", "seed=1")


def test_the_run_files_that_a_run_file_begins_with_travel_too(tmp_path):
    folder = tmp_path / "team"
    folder.mkdir()
    first, second, third = tmp_path / "run.yaml", folder / "base.yaml", tmp_path / "base.yaml"
    third.write_text("{experiment: quickstart, set: {seed: 5}}\n")
    second.write_text(f'{{"experiment": "{third}", "set": {{"log_every_steps": 6}}}}')
    first.write_text(f"# ours\nexperiment: {second}  # theirs\nset: {{max_steps: 4}}\n")
    job = make_job(str(first), {}, run_dir="s3://bucket/run")
    remote_folder = tmp_path / "there"
    files = job.files(str(remote_folder))
    assert [Path(path).name for path in files] == ["run.yaml", "base.yaml", "2-base.yaml"]
    assert files[f"{remote_folder}/run.yaml"].startswith("# ours\n")
    remote_folder.mkdir()
    for path, text in files.items():
        Path(path).write_text(text)
    for path in (first, second, third):
        path.unlink()
    again = resolve(next(iter(files))).config
    assert (again.seed, again.log_every_steps, again.max_steps) == (5, 6, 4)
    assert again == job.config


def test_every_launcher_ships_them(tmp_path):
    base, file = tmp_path / "base.yaml", tmp_path / "run.yaml"
    base.write_text("experiment: quickstart\nset: {seed: 5, max_steps: 3}\n")
    file.write_text(f"experiment: {base}\n")
    for words in (
        ("slurm", "--run-dir", str(tmp_path / "run")),
        ("kubernetes", "--run-dir", "gs://bucket/run", "--option", "image=x"),
        ("sky", "--run-dir", "s3://bucket/run"),
    ):
        text = cli_runs.axlearn("launch", str(file), "--hosts", "2", "--dry-run", "--on", *words).stdout
        assert "set: {seed: 5, max_steps: 3}" in text, words[0]
        assert f"experiment: {base}" not in text, words[0]
    agent = Agent(Setup(words=("train", str(file)), document=file.read_text(), bases={str(base): base.read_text()}))
    try:
        base.unlink()
        assert resolve(agent.words[1]).config.seed == 5
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "rai"), "did you mean: ray"),
        (("--on", "local", "--option", "freze-seconds=3"), "did you mean: freeze-seconds"),
        (("--on", "local", "--option", "freeze-seconds=soon"), "expected: a number"),
        (("--on", "local", "--option", "crash-loop=0"), "crash_loop"),
        (("--on", "local", "--option", "compile-cache=maybe"), "expected: true or false"),
        (("--on", "local", "--env", "A"), "expected NAME=VALUE"),
        (("--on", "local", "--env", "A=1", "--env", "A=2"), "given twice"),
        (
            ("--on", "local", "--hosts", "3", "--set", "mesh.shape={data: 4}"),
            "cannot be divided evenly among 3 processes",
        ),
        (
            ("--on", "local", "--hosts", "3", "--set", "input.batch_size=8"),
            "input.batch_size 8 cannot be divided evenly",
        ),
        (("--on", "local", "--hosts", "2", "--set", "seedd=1"), "did you mean: seed"),
    ],
)
def test_errors_are_reported_before_anything_starts(tmp_path, words, message):
    result = cli_runs.axlearn("launch", "quickstart", "--run-dir", str(tmp_path / "run"), *words, code=2)
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_named_before_ray_starts(tmp_path):
    (tmp_path / "file").write_text("")
    words = ("--run-dir", str(tmp_path / "file" / "run"), "--on", "local")
    result = cli_runs.axlearn("launch", "quickstart", *words, code=2)
    assert "--run-dir: cannot launch the run: processes.jsonl cannot be written: Not a directory" in result.stderr
    with pytest.raises(RequestError, match="no such bucket"):
        Journal(Unwritable()).check()


class Unwritable:
    """A bucket that is not there."""

    def read(self, path):
        raise MissingFileError(path)

    def write(self, path, chunks):
        raise StorageError("no such bucket")


def test_ray_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("axlearn_plugins_runtime.launch.ray.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install \"axlearn-plugins-runtime\[ray\]\""):
        RayLauncher().check()


def test_a_ray_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("axlearn_plugins_runtime.launch.ray.find_spec", lambda name: name)
    monkeypatch.setattr("axlearn_plugins_runtime.launch.ray.version", lambda name: "2.54.1")
    with pytest.raises(
        RequestError, match=r"require Ray 2.55 or newer\n    got: Ray 2.54.1\n    fix: pip install --upgrade"
    ):
        RayLauncher().check()
    monkeypatch.setattr("axlearn_plugins_runtime.launch.ray.version", lambda name: "2.55.0rc1")
    RayLauncher().check()


class Refusing:
    """A Ray whose cluster cannot be joined."""

    def __init__(self, text):
        self.text = text

    def init(self, **_):
        raise RuntimeError(self.text)


def test_a_cluster_of_another_ray_is_named_with_both_versions():
    text = """Version mismatch: The cluster was started with:
    Ray: 2.56.0
    Python: 3.11.7
This process on node 127.0.0.1:6399 was started with:
    Ray: 2.60.0
    Python: 3.11.8
"""
    job = Job(
        name="toy", experiment="quickstart", run_dir="/run", options=RayLauncher.Options(address="127.0.0.1:6399")
    )
    with pytest.raises(RequestError) as error:
        RayLauncher()._connect(Refusing(text), job)
    message = str(error.value)
    assert "got: 2.60.0, 3.11.8 here" in message
    assert "expected: 2.56.0, 3.11.7" in message
    with pytest.raises(RequestError, match=r"at '127.0.0.1:6399': no answer\n    fix: start one"):
        RayLauncher()._connect(Refusing("no answer\nat all"), job)


def test_a_ray_that_does_not_start_is_one_error():
    class Slow:
        def init(self, **_):
            raise Exception("The current node timed out during startup.")  # as Ray does

    job = Job(name="toy", experiment="quickstart", run_dir="/run", options=LocalOptions())
    with pytest.raises(
        RequestError, match=r"cannot start Ray on this machine: The current node timed out during startup"
    ):
        LocalLauncher()._connect(Slow(), job)


@pytest.mark.parametrize(
    ("rows", "hosts", "fix"),
    [
        (8, 3, "input.batch_size=6 or input.batch_size=9; or --hosts 2 or --hosts 4"),
        (2, 5, "input.batch_size=5; or --hosts 2"),
        (7, 2, "input.batch_size=6 or input.batch_size=8; or --hosts 1 or --hosts 7"),
    ],
)
def test_a_batch_that_hosts_cannot_share_names_the_nearest_that_they_can(rows, hosts, fix):
    with pytest.raises(RequestError, match=f"input.batch_size {rows} cannot be divided evenly.*\n.*\n    fix: {fix}$"):
        check_hosts(config(**{"input.batch_size": rows}), None, hosts, 1)


def test_the_nearest_hosts_count_their_processes():
    fix = r"fix: input\.batch_size=6 or input\.batch_size=12; or --hosts 2 or --hosts 4$"
    with pytest.raises(RequestError, match=fix):
        check_hosts(config(**{"input.batch_size": 8}), None, 3, 2)


def test_the_hosts_of_a_target():
    machine = Machine(name="h100-8x4", target=GPU, chips=32, domains=4, chips_per_host=8)
    assert check_hosts(config(), machine, None, 1) == 4
    with pytest.raises(RequestError, match="has 4 hosts of 8 chips"):
        check_hosts(config(), machine, 3, 1)
    assert check_hosts(config(), None, None, 1) == 1


@pytest.mark.parametrize(
    ("shape", "fewer", "words"),
    [
        ({}, 2, ()),
        ({}, 3, None),  # 8 rows
        ({"data": -1}, 2, ()),
        ({"data": 4}, 2, ("--set", "mesh.shape.data=2")),
        ({"data": 2, "fsdp": 2}, 2, ("--set", "mesh.shape.data=1")),
        ({"fsdp": 4}, 1, ("--set", "mesh.shape.fsdp=1")),
        ({"tensor": 4}, 2, None),  # another layout of the model: not a smaller data-parallel size
        ({"data": 1, "tensor": 4}, 2, None),
        ({"tensor": -1}, 2, None),
    ],
)
def test_which_meshes_may_shrink(shape, fewer, words):
    result = config(**{"mesh.shape": shape, "input.batch_size": 8})
    assert reduced_words(result, None, 4, fewer, 4) == words


def test_a_smaller_target():
    machine = Machine(name="h100-8x4", target=GPU, chips=32, domains=4, chips_per_host=8)
    assert reduced_words(config(), machine, 4, 3, 32) == ("--target", "h100-8x3")


def test_options_have_the_types_of_their_fields():
    options = parse_options(
        LocalOptions, {"freeze-seconds": "2.5", "budget-user": "0", "compile-cache": "false"}, "local"
    )
    limits = options.limits()
    assert (limits.freeze_seconds, limits.budgets["user"], options.compile_cache) == (2.5, 0, False)
