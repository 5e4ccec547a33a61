"""Distributed hashing of Orbax's files, and failure reports from processes during a save."""

import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import PEER_SECONDS
from axlearn_core.checkpoint.manifest import STATE, hash_file
from axlearn_core.checkpoint.storage import LocalStorage, sync_path
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import StorageError

log = logging.getLogger(__name__)
HASHES = "hashes"
"""Folder with the hashes of each process, until process 0 collects them."""
FAILED = ".failed"
"""Suffix of the file that a process writes to this folder if its save fails."""


class PeerError(StorageError):
    """Raised if a save failed on another process."""


def split_files(sizes: Mapping[str, int]) -> list[str]:
    """Return the files that this process hashes. The bytes per process differ by at most the size of one file."""
    loads = [0] * jax.process_count()
    shares: list[list[str]] = [[] for _ in loads]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name] + 1
        shares[lightest].append(name)
    return shares[jax.process_index()]


def hash_share(storage: Storage, folder: str) -> dict[str, dict[str, Any]]:
    """Return the sizes and hashes of this process's share of Orbax's files, by path in a folder."""
    files = storage.list(f"{folder}{STATE}/")
    sizes = {f.path.removeprefix(folder): f.bytes for f in files}

    def describe(name: str) -> dict[str, Any]:
        if isinstance(storage, LocalStorage):  # TensorStore syncs its files, but Orbax does not
            sync_path(storage.root / folder / name)
        return {"bytes": sizes[name], "sha256": hash_file(storage, f"{folder}{name}", sizes[name])}

    names = split_files(sizes)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(describe, names), strict=True))


def collect_hashes(
    storage: Storage, folder: str, processes: int, seconds: float = PEER_SECONDS
) -> dict[str, dict[str, Any]]:
    """Wait until every process has hashed its share. Return the hashes of all files, and delete the folder of hashes.

    Raises:
        StorageError: A process failed or did not finish in time. The error names it.
    """
    deadline, pause = time.monotonic() + seconds, 0.02
    expected = {f"{folder}{HASHES}/{p}.json": p for p in range(processes)}
    while True:
        paths = list_hashes(storage, folder)
        if not (missing := [p for path, p in expected.items() if path not in paths]):
            break
        if time.monotonic() > deadline:
            raise StorageError(f"no hashes of process {', '.join(map(str, missing))} after {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    files: dict[str, dict[str, Any]] = {}
    for path in expected:
        files |= json.loads(storage.read(path))
    storage.delete(f"{folder}{HASHES}")
    return files


def list_hashes(storage: Storage, folder: str) -> set[str]:
    """Return the hash files that the processes in a save have written so far.

    Args:
        storage: Storage of the save.
        folder: Staging folder of the save, with a trailing `/`.

    Raises:
        PeerError: A process failed. The error names it and gives the reason.
    """
    paths = {f.path for f in storage.list(f"{folder}{HASHES}/")}
    if failed := sorted(p for p in paths if p.endswith(FAILED)):
        process = failed[0].rpartition("/")[2].removesuffix(FAILED)
        raise PeerError(f"process {process}: {storage.read(failed[0]).decode(errors='replace')}")
    return paths


def mark_failure(storage: Storage, folder: str, error: BaseException) -> None:
    """Report a failure or timeout of the save on this process to the other processes."""
    if isinstance(error, PeerError) or (jax.process_count() == 1 and not isinstance(error, TimeoutError)):
        return
    try:
        storage.write(f"{folder}{HASHES}/{jax.process_index()}{FAILED}", [str(error).encode() or b"?"])
    except StorageError as unwritten:  # the other processes wait for Orbax's timeout
        log.warning("cannot report a failed save to the other processes: %s", unwritten)
