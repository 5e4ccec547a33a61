"""Fingerprints of data files, by which a run notices that its data is not what it was.

Up to `BLOCKS * BLOCK` bytes (256 MiB) of data are hashed whole. Of more, blocks spread evenly over each file are, its first and
last among them. Files behind a URL go by what their store says of them (an ETag or checksum), else by two blocks.
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
        path: where it is.
        name: what reports and splits call it.
        size: in bytes.
        modified: when it was written last, in nanoseconds; None behind a URL.
        blocks: how many blocks of it the digest covers at most; 0 where it has no digest.
        digest: of its content.
    """

    path: str
    name: str
    size: int
    modified: int | None = None
    blocks: int = 0
    digest: str = ""

    def check(self, handle: IO[bytes]) -> None:
        """Raises `InputError` where an open file is not the one that was listed: other bytes were put there since."""
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
                "    fix: bring the file back as it was, and run the same command again"
            )


def fingerprint_files(files: Sequence[DataFile]) -> tuple[DataFile, ...]:
    """Local files with their digests. Raises `InputError` where one cannot be read."""
    blocks = max(2, BLOCKS // max(len(files), 1))

    def fingerprint(file: DataFile) -> DataFile:
        try:
            modified = os.stat(file.path).st_mtime_ns
            digest = _digest(file.path, file.size, modified, blocks)
        except OSError as error:
            raise InputError(f"cannot read the data file {file.path}: {error.strerror or error}") from None
        return attrs.evolve(file, modified=modified, blocks=blocks, digest=digest)

    if sum(f.size for f in files) < 1 << 24:  # threads cost more
        return tuple(map(fingerprint, files))
    with ThreadPoolExecutor(THREADS) as pool:
        return tuple(pool.map(fingerprint, files))


def remote_digest(info: Mapping[str, Any], filesystem: Any) -> str:
    """The digest of a file behind a URL, from what fsspec lists of it."""
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
