"""A cache of the compiled step in the run directory. A process that resumes the run loads the step instead of tracing it.

    compiled/<identity>/executables.json    index with the source and target; see `axlearn_core.compose.executables`
    compiled/<identity>/train-0.executable  the compiled program
    compiled/<identity>.seal                signatures of the index
    compiled/<identity>.tries               one byte per attempt that loaded it and has not finished a step

An executable is code, and a run directory may come from another user. Therefore an executable is loaded only if no other user
can write to it, and if it was signed by this user or the job's supervisor. The user's key is in the cache folder of the home
directory.
"""

import contextlib
import faulthandler
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import reduce_objects
from axlearn_core.compose import Program
from axlearn_core.compose.executables import INDEX, read_facts
from axlearn_core.compose.identity import program_identity
from axlearn_core.config.assets import make_portable
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.run.events import RunListener
from axlearn_core.run.record import write_whole
from axlearn_plugins_runtime.job.holder import JOB

FOLDER = "compiled"
KEEP = 2
"""Number of compiled steps to keep: one for the full job and one for fewer hosts."""
TRIES = 3
"""Number of attempts that may load an executable without finishing a step. The executable is then removed."""
LOAD_SECONDS = 300.0
"""Give up after this many seconds. XLA can deadlock while loading."""
RESTART = 75
"""Exit code of a process that asks to be restarted: EX_TEMPFAIL in sysexits.h."""


class CompiledStep(RunListener):
    """Saves and loads the `train` function of a program. See `axlearn_core.contracts.capabilities.KeepsExecutables`.

    Args:
        run_dir: Run directory, which every process must be able to read.
        program: Program of the run.

    Attributes:
        facts: Facts about the loaded step (`flops`, `kernels`, `fingerprint`). Empty if no step was loaded.
    """

    def __init__(self, run_dir: Path, program: Program):
        self.program = program
        self.facts: Mapping[str, Any] = {}
        self._root = run_dir / FOLDER
        self._folder: Path | None = None
        self._identity: dict[str, str] | None = None
        self._thread: threading.Thread | None = None
        self._loaded: bool | None = None
        self._is_unfit = False
        self._is_proven = False

    def load_step(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load the step for a batch. Return the facts about it, or an empty mapping if it was not loaded."""
        return self.facts if self.load(batch) else {}

    def load(self, batch: Mapping[str, Any]) -> bool:
        """Load the step for a batch from the files of an earlier attempt. Return True if all processes loaded it.

        Otherwise the step is compiled as usual. The files must come from the same config, code, versions, flags and machine.
        """
        if self._loaded is not None:
            return self._loaded
        self._identity = identity(self.program)
        if self._identity is not None:
            text = json.dumps(self._identity, sort_keys=True)
            self._folder = self._root / hashlib.sha256(text.encode()).hexdigest()[:16]
        name = ""
        if self._folder is not None and self._folder.exists():
            try:
                with time_limit(LOAD_SECONDS, f"the compiled step in {self._folder} was not loaded within"):
                    self._load_files(self._folder, batch)
                name = self._folder.name
            except Exception as error:  # for any error, compile the step instead
                self._is_unfit = True
                reason = (str(error) or type(error).__name__).splitlines()[0]
                _log_note(f"the compiled step in {self._folder} was not loaded: {reason}")
        self._loaded = is_loaded = bool(reduce_objects(name, _is_same_name, "compiled step"))
        if not is_loaded:
            self.program.discard("train", batch)
            self.facts = {}
        elif jax.process_index() == 0:
            _log_note(f"loaded the compiled step from {self._folder}")
        return is_loaded

    def _load_files(self, folder: Path, batch: Mapping[str, Any]) -> None:
        check_private(folder)
        check_seal(folder)
        if jax.process_index() == 0:
            self._count_try(folder)
        self.program.load(folder, self._identity)
        if not self.program.exported("train", batch):
            raise RequestError("it has a different batch shape")
        self.program.compile("train", batch)
        self.facts = read_facts(folder)

    def _count_try(self, folder: Path) -> None:
        tries = folder.with_suffix(".tries")
        with tries.open("ab") as file:
            count = file.write(b".") and file.tell()
        if count > TRIES:
            shutil.rmtree(folder)
            tries.unlink()
            raise RequestError(f"{TRIES} attempts loaded it without finishing a step, so it was removed")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Reset the count of attempts, because the loaded executable finished a step."""
        if self._is_proven:
            return
        self._is_proven = True
        if self.facts and jax.process_index() == 0 and self._folder is not None:
            self._folder.with_suffix(".tries").unlink(missing_ok=True)

    def keep_step(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Save the step that process 0 compiled, in a background thread. If this fails, each attempt compiles the step."""
        if self._folder is None or self.facts or jax.process_index():
            return
        if self._folder.exists() and not self._is_unfit:
            return
        self._thread = threading.Thread(
            target=self._write, args=(self._folder, batch, dict(facts)), name="compiled-step"
        )
        self._thread.start()

    def _write(self, folder: Path, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        if self._is_unfit:
            shutil.rmtree(folder, ignore_errors=True)
        if self.program.was_cached("train", batch):
            return  # it came from JAX's compilation cache, and XLA cannot serialize such programs
        try:
            self.program.export(folder, {"train": [batch]}, self._identity, facts=facts)
            write_whole(folder.with_suffix(".seal"), json.dumps(_seals(folder)) + "\n")
            entries = sorted((p for p in self._root.iterdir() if (p / INDEX).exists()), key=lambda p: p.stat().st_mtime)
            for old in entries[:-KEEP]:
                shutil.rmtree(old)
                old.with_suffix(".seal").unlink(missing_ok=True)
        except (AxlearnError, OSError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            _log_note(f"the compiled step is not cached: {(str(error) or type(error).__name__).splitlines()[0]}")

    def closed(self) -> None:
        """Wait until the step is written."""
        if self._thread is not None:
            self._thread.join()


def compiled_step(session: Any) -> CompiledStep | None:
    """Return the listener for a run, or None if the run is at a URI or `keep_compiled_step` is False."""
    keeps = session.program.config.keep_compiled_step and session.uri is None
    return CompiledStep(session.path, session.program) if keeps else None


@contextlib.contextmanager
def time_limit(seconds: float, description: str) -> Iterator[None]:
    """If the block takes longer than `seconds`, write the stacks and end this process with exit code 75.

    A call into XLA cannot be interrupted, and other processes would wait for this one until they time out.
    """

    def end() -> None:
        _log_note(f"{description} {seconds:g} s: exiting with code {RESTART}; run the same command again")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(RESTART)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def identity(program: Program) -> dict[str, str] | None:
    """Return everything that determines the compiled step, by name. Equal identities mean equal programs.

    Returns:
        The identity, or None if the config has code that only this process defines. See `program_identity`.
    """
    config: Any = program.config
    return program_identity(program, {"config": make_portable(config)[0]}, ["train"])


def check_private(folder: Path) -> None:
    """Raise `RequestError` if a folder or a file in it belongs to another user or is writable by other users."""
    for path in (folder, *folder.iterdir()):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise RequestError(
                f"{path} may be written by other users: owner {status.st_uid}, mode {status.st_mode & 0o777:o}"
            )


def check_seal(folder: Path) -> None:
    """Raise `RequestError` unless this user or the supervisor of this job signed the executables of a folder."""
    try:
        seals = json.loads(folder.with_suffix(".seal").read_text())
        expected = _seals(folder)
    except (OSError, ValueError) as error:
        raise RequestError(f"its signature cannot be read: {error}") from error
    if not any(hmac.compare_digest(str(seals.get(name, "")), seal) for name, seal in expected.items()):
        raise RequestError("it is not signed by this user or by this job's supervisor")


def _seals(folder: Path) -> dict[str, str]:
    """Return this user's signature of an index and, if there is a supervisor, the supervisor's signature.

    The index contains the hashes of the executables.
    """
    job = os.environ.get(JOB, "")
    # Only a supervisor's id is random. Ids derived from a scheduler's job number can be guessed.
    keys = {"user": _user_key(), "job": job.encode() if re.fullmatch("[0-9a-f]{32}", job) else b""}
    content = (folder / INDEX).read_bytes()
    return {name: hmac.new(key, content, hashlib.sha256).hexdigest() for name, key in keys.items() if key}


def _user_key() -> bytes:
    """Return this user's secret on this machine, or b"" if the home directory cannot be written."""
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axlearn" / "key"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".key.{os.getpid()}")
        if not file.exists():
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                opened.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
            temporary.unlink()
        status = file.stat()
        return file.read_bytes() if status.st_uid == os.getuid() and not status.st_mode & 0o077 else b""
    except (OSError, RuntimeError):
        return b""


def _log_note(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"note: {text}", file=sys.stderr, flush=True)


def _is_same_name(names: Sequence[str]) -> bool:
    """Return True if every process loaded the same files."""
    return bool(names[0]) and len(set(names)) == 1
