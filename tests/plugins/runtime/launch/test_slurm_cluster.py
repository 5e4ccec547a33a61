"""Runs under a real Slurm: munged, slurmctld and three slurmd on this machine, all in a temporary folder."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import cli_runs

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Daemons are in sbin, which is not on everybody's PATH.
PATH = os.environ["PATH"] + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs Slurm: apt-get install slurm-wlm munge (missing: {', '.join(MISSING)})"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: slurmd starts processes as the job's user"),
]

RUN_FILE = """
experiment: quickstart
set:
  model.decoder.num_layers: 2
  model.decoder.hidden_dim: 32
  model.decoder.layer.attention.num_heads: 2
  model.decoder.layer.feed_forward.hidden_dim: 64
  learner.optimizer: {type: adamw, learning_rate: 0.01}
  input.batch_size: 6
  input.sequence_length: 32
  evaluators: {}
  checkpointer.every_steps: 3
  log_every_steps: 1
  mesh.shape: {data: -1}
"""

CONFIG = """
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SchedulerType=sched/backfill
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=30
KillWait=3
MinJobAge=600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Cluster:
    """Three nodes of Slurm. Commands find it by `environment`."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, {}
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
            for i in range(1, 4)
        )
        text = CONFIG.format(host=socket.gethostname(), controller=free_port(), folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self.environment = cli_runs.environment() | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(self):
        own = self.folder
        names = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        self.daemon("munged", "--foreground", "--force", *(f"--{k}={own / v}" for k, v in names.items()))
        self.wait_for(lambda: (own / "munge.socket").exists())
        self.daemon("slurmctld", "-D")
        for node in ("n1", "n2", "n3"):
            self.daemon("slurmd", "-D", "-N", node, name=node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-N", "-o", "%t", check=False).split() == ["idle"] * 3)

    def daemon(self, *command, name=None):
        with (self.folder / f"{name or command[0]}.out").open("w") as output:
            self.daemons[name or command[0]] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )

    def run(self, *command, check=True):
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, cwd=self.folder
        )
        assert not check or result.returncode == 0, result.stderr
        return result.stdout

    def launch(self, run_dir, *words, steps):
        """The number of a job, submitted as users do."""
        (self.folder / "run.yaml").write_text(RUN_FILE)
        command = [sys.executable, "-m", "axlearn_core", "launch", "run.yaml", "--on", "slurm", "--hosts", *words]
        return self.run(*command, "--run-dir", str(run_dir), "--steps", str(steps)).strip()

    def state(self, job):
        text = self.run("scontrol", "-o", "show", "job", job)
        return dict(word.partition("=")[::2] for word in text.split())

    def wait_for_end(self, job, timeout=400):
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.state(job)["JobState"] in states, timeout)
        return self.state(job)

    def wait_for(self, ready, timeout=60.0):
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def logs(self):
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out"), *self.folder.rglob("slurm-*.txt")]
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def stop(self):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", check=False)
            self.wait_for(lambda: not self.run("squeue", "-h", check=False).strip(), 20)
        for name in ("n1", "n2", "n3", "slurmctld", "munged"):
            if process := self.daemons.get(name):
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # Sockets have short paths.
    folder = Path(tmp_path_factory.mktemp("slurm"))
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """(step, loss) of a run that nothing happened to."""
    run = cluster.folder / "undisturbed"
    job = cluster.launch(run, "3", steps=20)
    state = cluster.wait_for_end(job)
    assert state["JobState"] == "COMPLETED", cluster.logs()
    return cli_runs.losses(run)


def events(run, event):
    file = run / "processes.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [r for r in map(json.loads, lines) if r["event"] == event]


def pid_of(run, attempt, rank):
    """Of a trainer of the n-th attempt."""
    actual = sorted({r["attempt"] for r in events(run, "started")})
    return next(r["pid"] for r in events(run, "started") if r["attempt"] == actual[attempt] and r["rank"] == rank)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_task_is_started_again_and_no_loss_differs(cluster, undisturbed, rank):
    run = cluster.folder / f"killed-{rank}"
    job = cluster.launch(run, "3", steps=20)
    cluster.wait_for(lambda: any((run / "checkpoints").glob("[0-9]*")) and len(cli_runs.logged(run)) >= 4, 300)
    os.kill(pid_of(run, 0, rank), signal.SIGKILL)
    state = cluster.wait_for_end(job)
    assert state["JobState"] == "COMPLETED", cluster.logs()
    assert len({r["attempt"] for r in events(run, "started")}) == 2
    assert cli_runs.losses(run) == undisturbed


def test_a_lost_node_is_replaced_by_the_spare(cluster):
    alone, run = cluster.folder / "alone", cluster.folder / "lost"
    cluster.wait_for_end(cluster.launch(alone, "2", steps=20))
    job = cluster.launch(run, "2", "--spares", "1", steps=20)
    cluster.wait_for(lambda: any((run / "checkpoints").glob("[0-9]*")) and len(cli_runs.logged(run)) >= 4, 300)
    trainer = pid_of(run, 0, 1)
    daemon = int(Path(f"/proc/{trainer}/stat").read_text().rpartition(")")[2].split()[1])  # its slurmstepd
    cluster.daemons["n2"].kill()
    for pid in (daemon, trainer):
        os.kill(pid, signal.SIGKILL)
    try:
        state = cluster.wait_for_end(job)
        assert state["JobState"] == "COMPLETED", cluster.logs()
        text = (run / "launch" / f"slurm-{job}.txt").read_text()
        assert "attempt 0 on n1,n2" in text
        assert "on n1,n3" in text
        assert cli_runs.losses(run) == cli_runs.losses(alone)
    finally:
        cluster.daemons["n2"].wait()
        cluster.daemon("slurmd", "-D", "-N", "n2", name="n2")
        cluster.wait_for(lambda: "idle" in cluster.run("sinfo", "-h", "-N", "-n", "n2", "-o", "%t"), 120)


def test_a_run_near_its_time_limit_saves_and_goes_back_to_the_queue(cluster, undisturbed):
    run = cluster.folder / "limit"
    job = cluster.launch(run, "3", steps=20)
    cluster.wait_for(lambda: len(cli_runs.logged(run)) >= 4, 300)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the limit
    state = cluster.wait_for_end(job, 500)
    assert state["JobState"] == "COMPLETED", cluster.logs()
    assert state["Restarts"] == "1"
    assert "was saved: requeueing the job" in (run / "launch" / f"slurm-{job}.txt").read_text()
    assert cli_runs.losses(run) == undisturbed
