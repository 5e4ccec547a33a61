"""The compiled step of a run as files in its directory: a process that continues the run loads it, and traces nothing.

    compiled/<identity>/executables.json    what it was compiled from and for; see `axlearn_core.compose.executables`
    compiled/<identity>/train-0.executable  the program
    compiled/<identity>.seal                who wrote it: signatures of the index
    compiled/<identity>.tries               one byte for each attempt that began with it and finished no step

An executable is code, and a run directory may come from somebody else. One is loaded only with the signature of this user, whose
key is in the cache folder of the home directory, or of the supervisor of this job, and only where nobody else can write it.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from axlearn_core.checkpoint.barrier import gather_objects
from axlearn_core.compose import Program
from axlearn_core.compose.executables import INDEX, read_facts
from axlearn_core.compose.identity import program_identity
from axlearn_core.config.assets import portable
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.run.events import RunListener
from axlearn_core.run.record import write_whole
from axlearn_plugins_runtime.job.holder import JOB

FOLDER = "compiled"
KEEP = 2
"""How many compiled steps stay: that of the whole job, and that of fewer hosts."""
TRIES = 3
"""An executable that so many attempts loaded, and none of them finished a step with, is removed."""
LOAD_SECONDS = 300.0
"""One that takes longer to load never will: XLA was seen to wait for a thread of its own that had long answered."""
RESTART = 75
"""Exit code of a process that wants to be started again: EX_TEMPFAIL of sysexits.h."""


class CompiledStep(RunListener):
    """Keeps and loads the function `train` of a program; see `axlearn_core.contracts.capabilities.KeepsExecutables`.

    Args:
        run_dir: of the run, which every process reaches.
        program: of the run.

    Attributes:
        facts: what was known of the step when it was compiled (`flops`, `kernels`, `fingerprint`), once it was loaded.
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
        """Loads the step for a batch; returns what was known of it when it was compiled, or nothing if it is not loaded."""
        return self.facts if self.load(batch) else {}

    def load(self, batch: Mapping[str, Any]) -> bool:
        """Takes the step for a batch from the files of an earlier attempt, if all processes can; returns whether they did.

        Without such files, or with files of another config, code, version, flag or machine, the step is compiled as usual.
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
                with time_limit(LOAD_SECONDS, f"the compiled step in {self._folder} is not loaded after"):
                    self._load_files(self._folder, batch)
                name = self._folder.name
            except Exception as error:  # any fault of the files: the step can be compiled instead
                self._is_unfit = True
                reason = (str(error) or type(error).__name__).splitlines()[0]
                _log_note(f"the compiled step in {self._folder} is not loaded: {reason}")
        names = gather_objects(name, "compiled step")
        self._loaded = bool(name) and set(names) == {name}
        if not self._loaded:
            self.program.discard("train", batch)
            self.facts = {}
        elif jax.process_index() == 0:
            _log_note(f"the compiled step is loaded from {self._folder}")
        return self._loaded

    def _load_files(self, folder: Path, batch: Mapping[str, Any]) -> None:
        check_private(folder)
        check_seal(folder)
        if jax.process_index() == 0:
            self._count_try(folder)
        self.program.load(folder, self._identity)
        if not self.program.exported("train", batch):
            raise RequestError("it is for batches of another shape")
        self.program.compile("train", batch)
        self.facts = read_facts(folder)

    def _count_try(self, folder: Path) -> None:
        tries = folder.with_suffix(".tries")
        with tries.open("ab") as file:
            count = file.write(b".") and file.tell()
        if count > TRIES:
            shutil.rmtree(folder)
            tries.unlink()
            raise RequestError(f"{TRIES} attempts began with it and finished no step; it is removed")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Forgets the attempts that began with what was loaded: it finished a step."""
        if self._is_proven:
            return
        self._is_proven = True
        if self.facts and jax.process_index() == 0 and self._folder is not None:
            self._folder.with_suffix(".tries").unlink(missing_ok=True)

    def keep_step(self, batch: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Keeps the step that the first process compiled, from a thread. A step that cannot be kept is compiled each time."""
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
            return  # JAX's compilation cache has it, and XLA cannot write what it has read
        try:
            self.program.export(folder, {"train": [batch]}, self._identity, facts=facts)
            write_whole(folder.with_suffix(".seal"), json.dumps(_seals(folder)) + "\n")
            entries = sorted((p for p in self._root.iterdir() if (p / INDEX).exists()), key=lambda p: p.stat().st_mtime)
            for old in entries[:-KEEP]:
                shutil.rmtree(old)
                old.with_suffix(".seal").unlink(missing_ok=True)
        except (AxlearnError, OSError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            _log_note(f"the compiled step is not kept: {(str(error) or type(error).__name__).splitlines()[0]}")

    def closed(self) -> None:
        """Waits until it is written."""
        if self._thread is not None:
            self._thread.join()


def compiled_step(session: Any) -> CompiledStep | None:
    """The listener of a run in a directory; None if the config keeps no compiled step, or the run is at a URI."""
    keeps = session.program.config.keep_compiled_step and session.uri is None
    return CompiledStep(session.path, session.program) if keeps else None


@contextlib.contextmanager
def time_limit(seconds: float, description: str) -> Iterator[None]:
    """Ends this process with exit code 75 and its stacks, for a supervisor, where the block takes longer.

    A call into XLA cannot be given up: other processes would wait for this one until their own limits.
    """

    def end() -> None:
        _log_note(f"{description} {seconds:g} s: this process ends (exit code {RESTART}); run the same command again")
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
    """Everything that a step is made from, by name: equal identities are equal programs.

    Returns:
        None if the config has code that only this process knows; see `program_identity`.
    """
    config: Any = program.config
    return program_identity(program, {"config": portable(config)[0]}, ["train"])


def check_private(folder: Path) -> None:
    """Raises `RequestError` where a folder, or a file in it, is another user's or can be written by others."""
    for path in (folder, *folder.iterdir()):
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise RequestError(f"{path} is not yours alone: owner {status.st_uid}, mode {status.st_mode & 0o777:o}")


def check_seal(folder: Path) -> None:
    """Raises `RequestError` where neither this user nor the supervisor of this job wrote the executables of a folder."""
    try:
        seals = json.loads(folder.with_suffix(".seal").read_text())
        expected = _seals(folder)
    except (OSError, ValueError) as error:
        raise RequestError(f"its signature cannot be read: {error}") from error
    if not any(hmac.compare_digest(str(seals.get(name, "")), seal) for name, seal in expected.items()):
        raise RequestError("it has no signature of this user or of this job's supervisor")


def _seals(folder: Path) -> dict[str, str]:
    """Signatures of an index, which has the hashes of the executables: the user's, and the supervisor's where there is one."""
    job = os.environ.get(JOB, "")
    # A supervisor's id is random. Those that are made of a scheduler's numbers can be guessed.
    keys = {"user": _user_key(), "job": job.encode() if re.fullmatch("[0-9a-f]{32}", job) else b""}
    content = (folder / INDEX).read_bytes()
    return {name: hmac.new(key, content, hashlib.sha256).hexdigest() for name, key in keys.items() if key}


def _user_key() -> bytes:
    """A secret of this user on this machine; empty where the home directory cannot be written."""
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
