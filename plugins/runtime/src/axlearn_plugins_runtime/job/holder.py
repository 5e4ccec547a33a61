"""One trainer for each place: a file names the trainer, which renews it as long as it lives."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint import open_storage
from axlearn_core.checkpoint.state import agree
from axlearn_core.checkpoint.storage import LocalStorage
from axlearn_core.contracts.capabilities import OwnsCheckpoints
from axlearn_core.contracts.experiment import checkpoint_uri
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import AxlearnError, CheckpointError, RequestError, StorageError, WorkError
from axlearn_core.run.events import RunListener

PREFIX = ".trainer-"
"""The file is `.trainer-N.json`. The highest N holds the place. A trainer that finds the holder dead creates N + 1."""
JOB = "AXLEARN_JOB"
"""Environment variable: the id of a supervisor, which starts processes only when those before them are dead."""
BEAT_SECONDS = 10.0
STALE_SECONDS = 6 * BEAT_SECONDS


class Holder:
    """Holds a run directory, or a place of checkpoints, against other trainers. Call `release` at the end.

    A holder on this machine is dead when its process is. One elsewhere is dead when its file is old by this machine's clock and
    stays as it is for two beats: clocks may differ. One of the same supervisor (`AXLEARN_JOB`) was ended before this one began.

    Args:
        storage: of the place.
        name: of the place, for people.
        run: the id of the run.

    Raises:
        CheckpointError: another trainer holds it.
        RequestError: the place cannot be reached or written.
    """

    def __init__(self, storage: Storage, name: str, run: str):
        self.storage, self.name = storage, name
        self.info = {"run": run, **_identity()}
        self._ended = threading.Event()
        self._lost: dict[str, Any] | None = None
        try:
            self.number = self._acquire()
        except StorageError as error:
            raise RequestError(
                f"cannot train in {name}: {error}\n    fix: make it reachable and writable, or give another place"
            ) from error
        self._thread = threading.Thread(target=self._beat, name="holder", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises `WorkError` if another trainer has taken the place, for example after a long freeze."""
        if self._lost is not None:
            raise WorkError(
                f"another trainer took {self.name} while this one did not answer: {_describe_holder(self._lost)}\n"
                "    fix: nothing more is written here; the other one goes on"
            )

    def release(self) -> None:
        """Lets the next trainer in."""
        self._ended.set()
        self._thread.join()
        try:
            self.storage.delete(self._path(self.number))
        except StorageError:
            return  # the file goes stale
        if isinstance(self.storage, LocalStorage):
            try:
                self.storage.root.rmdir()  # only if nothing else was ever written
            except OSError:
                return

    def _acquire(self) -> int:
        numbers = self._holders()
        newest = numbers[-1] if numbers else 0
        if newest and (record := self._alive(newest)) is not None:
            raise self._in_use_error(record)
        if not self.storage.create(self._path(newest + 1), self._text()):
            raise self._in_use_error(self._read(newest + 1) or {})
        later = [n for n in self._holders() if n not in numbers and n != newest + 1]
        if later:  # two found different holders dead at once: neither goes on
            self.storage.delete(self._path(newest + 1))
            raise self._in_use_error(self._read(later[-1]) or {})
        for number in numbers:
            self.storage.delete(self._path(number))
        return newest + 1

    def _alive(self, number: int) -> dict[str, Any] | None:
        """The record of the holder, or None if the holder is dead."""
        record = self._read(number)
        if record is None or (self.info["job"] and record.get("job") == self.info["job"]):
            return None
        if record.get("machine") == self.info["machine"]:
            return record if _process_start(int(record["pid"])) == record["started"] else None
        if time.time() - record["beat"] < STALE_SECONDS:
            return record
        time.sleep(2 * BEAT_SECONDS)
        later = self._read(number)
        return later if later is not None and later["beat"] != record["beat"] else None

    def _holders(self) -> list[int]:
        names = (f.path.removeprefix(PREFIX).removesuffix(".json") for f in self.storage.list(PREFIX))
        return sorted(int(n) for n in names if n.isdecimal())

    def _read(self, number: int) -> dict[str, Any] | None:
        try:
            return json.loads(self.storage.read(self._path(number)))
        except (StorageError, ValueError):
            return None

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                higher = [n for n in self._holders() if n > self.number]
                if higher:
                    self._lost = self._read(higher[-1]) or {}
                    return
                self.storage.write(self._path(self.number), [self._text()])
            except StorageError:
                continue  # the next beat may work; until then the file ages

    def _text(self) -> bytes:
        return json.dumps({**self.info, "beat": time.time()}).encode()

    def _path(self, number: int) -> str:
        return f"{PREFIX}{number}.json"

    def _in_use_error(self, record: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"{self.name} is in use by another trainer: {_describe_holder(record)}\n"
            "    fix: wait for it or stop it, or give another place; nothing was written"
        )


class HolderListener(RunListener):
    """Keeps other trainers out of the places of a run until the run is closed, from the first process."""

    position = "first"
    errors_name_plugin = False

    def __init__(self) -> None:
        self._holders: list[Holder] = []

    def opened(self, run: Any) -> None:
        """Takes hold of every place that the run writes to.

        Raises:
            CheckpointError: another trainer holds a place.
            RequestError: a place cannot be reached.
        """
        error: AxlearnError | None = None
        if jax.process_index() == 0:
            try:
                for name, storage in _places(run).items():
                    self._holders.append(Holder(storage, name, run.run_id))
            except AxlearnError as caught:
                error = caught
        agree(error, error)

    def saving(self, step: int) -> None:
        """Raises `WorkError` on every process if another trainer took over."""
        lost: AxlearnError | None = None
        for holder in self._holders:
            try:
                holder.check()
            except AxlearnError as caught:
                lost = caught
        agree(lost, lost)

    def closed(self) -> None:
        """Lets the next trainer in."""
        for holder in reversed(self._holders):
            holder.release()


def lock_holder(session: Any) -> HolderListener:
    """The listener of a run."""
    return HolderListener()


def _places(session: Any) -> dict[str, Storage]:
    """Name -> storage of every place that the run writes to: its directory, its URI, and its checkpoints elsewhere."""
    run_dir, checkpointer = session.run_dir, session.checkpointer
    places = {str(run_dir.path): open_storage(run_dir.path)}
    if isinstance(checkpointer, OwnsCheckpoints) and checkpoint_uri(session.program.config) is not None:
        places[checkpointer.place.name] = checkpointer.place.storage
    if run_dir.uri is not None:
        places[run_dir.uri] = open_storage(run_dir.uri)
    return places


def _describe_holder(record: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"])) if "since" in record else "now"
    return f"process {record.get('pid', '?')} on {record.get('host', '?')}, since {since}"


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": pid,
        "started": _process_start(pid),
        "since": time.time(),
        "job": os.environ.get(JOB, ""),
    }


def _machine() -> str:
    """The scope in which process ids are unique: a boot of a machine, and a namespace on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """The start time of a process, in units of the system; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if status[0] == "Z" else status[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"
