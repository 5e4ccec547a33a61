"""A headless Chromium, driven over its debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium or google-chrome")


class Page:
    """A page of the browser."""

    def __init__(self, read, write):
        self._read, self._write = read, write
        self._count, self._rest, self._session = 0, b"", None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Call a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._read, 1 << 16)
                assert chunk, "the browser has gone"
                self._rest += chunk
            raw, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script):
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=20.0):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self):
        """Return a screenshot as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def type(self, text, key=None):
        """Type into the focused element, then press a key."""
        self.call("Input.insertText", text=text)
        if key:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=13, text="\r")


@contextlib.contextmanager
def browser():
    """Yield a page of a new browser."""
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            f"--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --user-data-dir={profile}"
        )
        process = subprocess.Popen(
            ["bash", "-c", f"exec {CHROMIUM} {options} 3<&{read_there} 4>&{write_there}"],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        try:
            yield Page(read_here, write_here)
        finally:
            process.terminate()
            process.wait(20)
            os.close(read_here)
            os.close(write_here)
