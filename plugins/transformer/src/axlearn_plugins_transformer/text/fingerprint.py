"""Fingerprints of data files, which a run uses to detect that its data has changed.

Data of up to `BLOCKS * BLOCK` bytes (256 MiB) is hashed completely. For more data, evenly spaced blocks of each file are
hashed, including its first and last block. For files behind a URL, the ETag or checksum from their store is used, or else two
blocks are hashed.
"""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import attrs

from axlearn_core.errors import InputError

BLOCK = 1 << 16
BLOCKS = 4096
THREADS = 8
_CHECKSUMS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "checksum", "generation", "sha256")


@attrs.frozen
class DataFile:
    """A file of training data.

    Attributes:
        path: Path or URL.
        name: Name in reports and splits.
        size: Size in bytes.
        modified: Modification time in nanoseconds, or None for URLs.
        blocks: Maximum number of blocks in the digest, or 0 if the file does not have a digest.
        digest: Digest of the content.
    """

    path: str
    name: str
    size: int
    modified: int | None = None
    blocks: int = 0
    digest: str = ""

    def check(self, handle: IO[bytes]) -> None:
        """Raise InputError if an open file has changed since it was listed."""
        if self.modified is None:
            return
        status = os.fstat(handle.fileno())
        change = f"{self.size} bytes -> {status.st_size} bytes" if status.st_size != self.size else None
        if change is None and status.st_mtime_ns != self.modified and self.blocks:
            digest = _digest(self.path, self.size, status.st_mtime_ns, self.blocks)
            change = f"content {self.digest} -> {digest}" if digest != self.digest else None
        if change is not None:
            raise InputError(
                f"the data file {self.name} changed while it was in use\n    got: {change}\n"
                "    fix: restore the original file, and run the same command again"
            )


def fingerprint_files(files: Sequence[DataFile]) -> tuple[DataFile, ...]:
    """Return local files with their digests.

    Raise InputError if a file cannot be read.
    """
    blocks = max(2, BLOCKS // max(len(files), 1))

    def fingerprint(file: DataFile) -> DataFile:
        try:
            modified = os.stat(file.path).st_mtime_ns
            digest = _digest(file.path, file.size, modified, blocks)
        except OSError as error:
            raise InputError(f"cannot read the data file {file.path}: {error.strerror or error}") from None
        return attrs.evolve(file, modified=modified, blocks=blocks, digest=digest)

    if sum(f.size for f in files) < 1 << 24:  # there is too little work for threads
        return tuple(map(fingerprint, files))
    with ThreadPoolExecutor(THREADS) as pool:
        return tuple(pool.map(fingerprint, files))


def remote_digest(info: Mapping[str, Any], filesystem: Any) -> str:
    """Return the digest of a file behind a URL, from the information that fsspec lists."""
    for name in _CHECKSUMS:
        if info.get(name):
            return hashlib.sha256(f"{name}:{info[name]}".encode()).hexdigest()[:16]
    with filesystem.open(info["name"], "rb") as handle:
        return _hash_blocks(handle, int(info["size"] or 0), 2)


@functools.lru_cache(maxsize=1 << 16)
def _digest(path: str, size: int, modified: int, blocks: int) -> str:
    with open(path, "rb") as handle:
        return _hash_blocks(handle, size, blocks)


def _hash_blocks(handle: IO[bytes], size: int, blocks: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    if size <= blocks * BLOCK:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    else:
        for i in range(blocks):
            handle.seek((size - BLOCK) * i // (blocks - 1))
            digest.update(handle.read(BLOCK))
    return digest.hexdigest()[:16]
