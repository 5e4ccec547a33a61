"""A worker: a process whose engine runs the requests that the router sends.

    python -m axlearn_plugins_serving.disaggregated.engine_worker FD

FD is the worker's end of a socket pair. The worker exits when the other end is closed, so it never outlives its router.
"""

import functools
import multiprocessing.connection
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Output, Sampling
from axlearn_plugins_serving.disaggregated.router_messages import (
    Abort,
    Close,
    Decode,
    Failed,
    Prefill,
    Prefilled,
    Ready,
    Report,
)

_REPORT_SECONDS = 0.2
_WAIT_SECONDS = 0.05


@attrs.frozen(kw_only=True)
class Settings:
    """The model, engine config and programs that a worker starts with.

    Attributes:
        uri: Path or URI of the model.
        config: Config of the engine.
        step: See `open_engine`.
        programs: Directory of exported programs, or None.
        needs_programs: Whether to fail if the programs do not match the server. If False, the worker compiles its own.
        folder: Folder for transfers.
    """

    uri: str
    config: Any
    step: int | None
    programs: Path | None
    folder: str
    needs_programs: bool = False


class Worker:
    """Receives requests over a connection and runs them on an engine."""

    def __init__(self, connection: Any, engine: Any, folder: Path, tokenizer: Any):
        self.connection, self.engine, self.folder, self.tokenizer = connection, engine, folder, tokenizer
        self._prefills: dict[str, Any] = {}
        self._count = 0
        self._reported, self._changed = 0.0, False

    def run(self) -> None:
        """Run until the router closes the connection or sends `Close`."""
        while True:
            wait = 0.0 if self.engine.busy() else _WAIT_SECONDS
            while self.connection.poll(wait):
                message = self.connection.recv()
                if isinstance(message, Close):
                    return
                self._handle_message(message)
                wait = 0.0
            self._step()

    def _handle_message(self, message: Any) -> None:
        from axlearn_plugins_serving.disaggregated.handoff import read_prefix

        self._changed = True
        match message:
            case Prefill(request):
                self._prefills[request.id] = request
                sampling = Sampling(max_tokens=1, temperature=0.0, ignore_end=True)
                if not self._add(attrs.evolve(request, sampling=sampling)):
                    del self._prefills[request.id]
            case Decode(request, transfer, grammar):
                if transfer is not None:
                    read_prefix(self.engine, request.prompt, request.adapter, transfer)
                if grammar is not None:
                    request = attrs.evolve(request, constraint=self._grammars.rebuild(grammar))
                self._add(request)
            case Abort(id):
                self._prefills.pop(id, None)
                self.engine.abort(id)

    @functools.cached_property
    def _grammars(self) -> Any:
        from axlearn_plugins_serving.server.constraints import Grammars

        return Grammars(self.tokenizer, self.engine.vocab_size)

    def _add(self, request: Any) -> bool:
        try:
            self.engine.add(request)
        except RequestError as error:
            failure = Output(id=request.id, finish="error", error=str(error), request_wrong=True)
            is_prefill = request.id in self._prefills
            self.connection.send(Prefilled(request.id, None, failure) if is_prefill else Report([failure]))
            return False
        return True

    def _step(self) -> None:
        outputs = self.engine.step() if self.engine.busy() else ()
        other_outputs = []
        for output in outputs:
            if (request := self._prefills.get(output.id)) is None:
                other_outputs.append(output)
            elif output.finish is not None:
                del self._prefills[output.id]
                self._send_prefilled(request, output)
        # Report only after a change, because nobody reads an idle worker's messages. The router reads the last outputs.
        is_late = time.monotonic() - self._reported > _REPORT_SECONDS
        due = self._changed and (is_late or not self.engine.busy())
        if due:
            self._reported, self._changed = time.monotonic(), self.engine.busy()
        if other_outputs or due:
            self.connection.send(Report(other_outputs, self.engine.statistics() if due else None))

    def _send_prefilled(self, request: Any, output: Output) -> None:
        from axlearn_plugins_serving.disaggregated.handoff import write_prefix

        if output.error is not None:
            self.connection.send(Prefilled(request.id, None, output))
            return
        self._count += 1
        path = self.folder / f"{self.connection.fileno()}-{id(self):x}-{self._count}"
        transfer = write_prefix(self.engine, request.prompt, request.adapter, path)
        self.connection.send(Prefilled(request.id, transfer, cached_tokens=output.cached_tokens))


def main(descriptor: int) -> int:
    """Run a worker on its end of a socket pair."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the router drains first and then closes the connection
        signal.signal(number, signal.SIG_IGN)
    connection = multiprocessing.connection.Connection(descriptor)
    settings: Settings = pickle.loads(connection.recv_bytes())
    from axlearn_core.errors import AxlearnError
    from axlearn_plugins_serving.compile_count import CompileCount
    from axlearn_plugins_serving.disaggregated.handoff import check_transfers
    from axlearn_plugins_serving.engine_devices import set_up_devices
    from axlearn_plugins_serving.open_engine import open_engine, open_with_programs

    count = CompileCount()
    set_up_devices(settings.config, owns_cores=settings.programs is not None)
    try:
        options = {"config": settings.config, "step": settings.step, "programs": settings.programs}
        opened = (open_engine if settings.needs_programs else open_with_programs)(settings.uri, **options)
        check_transfers(opened.engine)
    except AxlearnError as error:
        connection.send(Failed(str(error), request_wrong=isinstance(error, RequestError) or error.exit_code == 2))
        return error.exit_code
    engine = opened.engine
    runner: Any = engine.runner
    connection.send(
        Ready(
            vocab_size=engine.vocab_size,
            max_context=engine.max_context,
            max_logit_bias=runner.max_logit_bias,
            adapters=tuple(engine.adapters),
            blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_rows=runner.max_rows,
            compilations=count.compiled,
        )
    )
    try:
        Worker(connection, engine, Path(settings.folder), opened.tokenizer).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the router has exited
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
