"""Training runs of a few seconds, started from the command line."""

import atexit
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

# A rate that does not depend on max_steps, so that a shorter run is the beginning of a longer one.
SETTINGS = (
    "model.decoder.num_layers=2",
    "model.decoder.hidden_dim=32",
    "model.decoder.layer.attention.num_heads=2",
    "model.decoder.layer.feed_forward.hidden_dim=64",
    "learner.optimizer={type: adamw, learning_rate: 0.01}",
    "input.batch_size=4",
    "input.sequence_length=32",
    "evaluators={}",
    "checkpointer.every_steps=3",
    "log_every_steps=1",
)


def arguments(run_dir: Path, *, steps: int, more: tuple[str, ...] = (), settings: tuple[str, ...] = ()) -> list[str]:
    """`train quickstart` at toy size."""
    by_path = {s.partition("=")[0]: s for s in (*SETTINGS, *settings)}
    sets = [word for s in by_path.values() for word in ("--set", s)]
    return ["train", "quickstart", "--run-dir", str(run_dir), "--steps", str(steps), *sets, *more]


def environment() -> dict[str, str]:
    """One CPU device, regardless of what this process uses."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"],
        "PYTHONUNBUFFERED": "1",
    }


@functools.cache
def worker() -> subprocess.Popen[str]:
    """One process that has JAX imported, for the commands of all tests that need no process of their own."""
    file = Path(__file__).with_name("command_worker.py")
    process = subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )

    def close() -> None:
        process.communicate(timeout=60)

    atexit.register(close)
    return process


def axlearn(*args: str, code: int = 0, timeout: float = 300, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the command and checks its exit code; `fresh`: in a process of its own."""
    if fresh:
        command = [sys.executable, "-m", "axlearn_core", *args]
        process = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=timeout)
    else:
        serving = worker()
        assert serving.stdin
        assert serving.stdout
        request = {"cwd": os.getcwd(), "kind": "bash", "text": shlex.join(["axlearn", *args])}
        serving.stdin.write(json.dumps(request) + "\n")
        serving.stdin.flush()
        answer = json.loads(serving.stdout.readline())
        process = subprocess.CompletedProcess(args, answer["code"], answer["out"], answer["err"])
    assert process.returncode == code, (
        f"exit {process.returncode}, not {code}\n{process.stdout[-2000:]}\n{process.stderr[-5000:]}"
    )
    return process


def start(*args: str) -> subprocess.Popen[str]:
    """Starts the command in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "axlearn_core", *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def kill_when(process: subprocess.Popen[str], ready, number: int = signal.SIGKILL, timeout: float = 300) -> bool:
    """Sends a signal once `ready()` holds; False where the process ended by itself before that."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if process.poll() is not None:
            return False
        if ready():
            process.send_signal(number)
            return True
        time.sleep(0.005)
    process.kill()
    raise AssertionError("the run did not get there in time")


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it does not exist, for example while a run that starts over moves it aside."""
    try:
        return file.read_text().splitlines()
    except FileNotFoundError:
        return []


def metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; a last line that a kill tore is left out."""
    results = []
    for line in read_lines(run_dir / "metrics.jsonl"):
        try:
            results.append(json.loads(line))
        except ValueError:
            break
    return results


def logged(run_dir: Path) -> list[int]:
    """The steps whose loss is logged so far; none before the first."""
    return [m["step"] for m in metrics(run_dir) if "loss" in m]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) in the order of the file."""
    rows = [(m["step"], m["loss"]) for m in metrics(run_dir) if "loss" in m]
    assert rows, f"{run_dir} has logged no loss"
    return rows


def stored_state(run_dir: Path) -> dict[str, tuple[str, bytes]]:
    """Path -> (dtype, bytes) of every array in the newest checkpoint of a run, whichever checkpointer wrote it."""
    import numpy as np

    from axlearn_core.plugins.registry import registry

    root = run_dir / "checkpoints"
    step = max(int(p.name) for p in root.iterdir() if p.name.isdigit())
    kind = "orbax" if (root / f"{step}/state/_CHECKPOINT_METADATA").exists() else "sharded"
    checkpointer = registry().component(kind)().build(directory=root)
    try:
        manifest = checkpointer.inspect(step)
        paths = [path for path, info in manifest.arrays.items() if 0 not in info.shape]
        arrays = checkpointer.reader(manifest).read(dict.fromkeys(paths))
    finally:
        checkpointer.close()
    return {path: (str(x.dtype), np.asarray(x).tobytes()) for path, x in sorted(arrays.items())}
