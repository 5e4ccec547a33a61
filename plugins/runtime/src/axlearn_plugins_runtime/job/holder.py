"""A lock that allows one trainer per location. It is a file that the trainer renews while it runs."""

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
"""Prefix of the file `.trainer-N.json`. The highest N is the holder. A trainer that finds the holder dead creates N + 1."""
JOB = "AXLEARN_JOB"
"""Environment variable with the id of a supervisor. A supervisor starts processes only after the earlier ones are dead."""
BEAT_SECONDS = 10.0
STALE_SECONDS = 6 * BEAT_SECONDS


class Holder:
    """A lock on a run directory or a checkpoint location. Call `release` at the end.

    The lock of a dead holder can be taken over. A holder on this machine is dead if its process has ended. A holder on a
    different machine is dead if its file is old according to this machine's clock and does not change for two more beats. The
    second condition is needed because clocks may differ. A holder with the same supervisor (`AXLEARN_JOB`) is dead, because the
    supervisor ended it before it started this process.

    Args:
        storage: Storage of the location.
        name: Name of the location, for use in messages.
        run: Id of the run.

    Raises:
        CheckpointError: Another trainer holds the lock.
        RequestError: The location cannot be reached or written.
    """

    def __init__(self, storage: Storage, name: str, run: str):
        self.storage, self.name = storage, name
        self.info = {"run": run, **_identity()}
        self._ended = threading.Event()
        self._successor: dict[str, Any] | None = None
        try:
            self.number = self._acquire()
        except StorageError as error:
            raise RequestError(
                f"cannot train in {name}: {error}\n    fix: make it reachable and writable, or use another location"
            ) from error
        self._thread = threading.Thread(target=self._beat, name="holder", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `WorkError` if another trainer has taken the lock, for example after a long freeze."""
        if self._successor is not None:
            raise WorkError(
                f"another trainer took over {self.name} while this one did not respond: {_describe_holder(self._successor)}\n"
                "    fix: none needed; this trainer stops writing, and the other one continues"
            )

    def release(self) -> None:
        """Release the lock."""
        self._ended.set()
        self._thread.join()
        try:
            self.storage.delete(self._path(self.number))
        except StorageError:
            return  # the file becomes stale
        if isinstance(self.storage, LocalStorage):
            try:
                self.storage.root.rmdir()  # succeeds only if nothing else was written
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
        if later:  # two trainers found a holder dead at the same time: both give up
            self.storage.delete(self._path(newest + 1))
            raise self._in_use_error(self._read(later[-1]) or {})
        for number in numbers:
            self.storage.delete(self._path(number))
        return newest + 1

    def _alive(self, number: int) -> dict[str, Any] | None:
        """Return the record of the holder, or None if the holder is dead."""
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
                    self._successor = self._read(higher[-1]) or {}
                    return
                self.storage.write(self._path(self.number), [self._text()])
            except StorageError:
                continue  # the next beat may succeed

    def _text(self) -> bytes:
        return json.dumps({**self.info, "beat": time.time()}).encode()

    def _path(self, number: int) -> str:
        return f"{PREFIX}{number}.json"

    def _in_use_error(self, record: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"{self.name} is in use by another trainer: {_describe_holder(record)}\n"
            "    fix: wait for it, stop it, or use another location; nothing was written"
        )


class HolderListener(RunListener):
    """Locks the locations of a run until it is closed. Runs on process 0."""

    position = "first"
    errors_name_plugin = False

    def __init__(self) -> None:
        self._holders: list[Holder] = []

    def opened(self, run: Any) -> None:
        """Lock every location that the run writes to.

        Raises:
            CheckpointError: Another trainer holds a location.
            RequestError: A location cannot be reached.
        """
        error: AxlearnError | None = None
        if jax.process_index() == 0:
            try:
                for name, storage in _locations(run).items():
                    self._holders.append(Holder(storage, name, run.run_id))
            except AxlearnError as caught:
                error = caught
        agree(error, error)

    def saving(self, step: int) -> None:
        """Raise `WorkError` on every process if another trainer took over."""
        lost: AxlearnError | None = None
        for holder in self._holders:
            try:
                holder.check()
            except AxlearnError as caught:
                lost = caught
        agree(lost, lost)

    def closed(self) -> None:
        """Release the locks."""
        for holder in reversed(self._holders):
            holder.release()


def lock_holder(session: Any) -> HolderListener:
    """Return the listener for a run."""
    return HolderListener()


def _locations(session: Any) -> dict[str, Storage]:
    """Return the storage of every location that the run writes to, by name.

    These are its directory, its URI, and its checkpoint location if that is elsewhere.
    """
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
    """Return the scope in which process ids are unique: the boot id and the process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """Return the start time of a process in system units, or None if it does not exist."""
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
