"""A server in a thread of the test process, on a real loopback socket."""

import asyncio
import contextlib
import threading

from axlearn_plugins_serving.server.engine_thread import EngineThread
from axlearn_plugins_serving.server.limits import ServerLimits
from axlearn_plugins_serving.server.server_runner import ServerRunner, bind
from axlearn_plugins_serving.server.service import Service
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.processor import TextProcessor
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer


class Running:
    """A running server.

    Attributes:
        url: URL of the server.
        code: Exit code, once the server has stopped.
    """

    def __init__(self, service, listener):
        self.service, self.engine = service, service.thread.engine
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.code = None
        self.loop = None
        self.runner = None

    def stop(self):
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.runner.stop)

    def wait_until_idle(self, seconds=10.0):
        """Wait until the engine is idle."""
        event = threading.Event()
        for _ in range(int(seconds / 0.02)):
            if not self.engine.busy() and not self.service.thread.active:
                return
            event.wait(0.02)
        raise AssertionError("the engine is still busy")


@contextlib.contextmanager
def serving(
    engine,
    *,
    tokenizer=None,
    template="plain",
    limits=None,
    grace=5.0,
    tracer=None,
    name="tiny",
    adapters=(),
    tool_parser=None,
    reasoning_parser=None,
    aliases=(),
    allows_sleep=False,
    allows_adapters=False,
    **thread,
):
    """Run a server, stop it, and check that the engine was closed and all blocks were freed."""
    tokenizer = tokenizer or ByteTokenizer.Config().build()
    chat = ChatTemplate.Config() if template == "plain" else template and template.config
    text = TextProcessor.Config(template=chat).build(tokenizer=tokenizer)
    parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    service = Service(
        EngineThread(engine, **thread),
        text,
        name,
        adapters=adapters,
        aliases=aliases,
        allows_sleep=allows_sleep,
        allows_adapters=allows_adapters,
        **parsers,
    )
    listener = bind("127.0.0.1", 0)
    running = Running(service, listener)
    ready = threading.Event()

    async def run():
        running.loop = asyncio.get_running_loop()
        running.runner = ServerRunner(service, limits or ServerLimits(), grace=grace, tracer=tracer)
        running.code = await running.runner.run(listener, ready.set)

    def main():
        try:
            asyncio.run(run())
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    running.thread = thread
    try:
        assert ready.wait(20)
        yield running
    finally:
        running.stop()
        thread.join(20)
        assert not thread.is_alive()
