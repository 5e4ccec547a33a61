"""The page, in a real browser."""

import re
from importlib.resources import files

import pytest

from axlearn_plugins_serving.server.limits import ServerLimits
from support.browser import browser, needs_browser
from support.fake_engine import FakeEngine
from support.server_thread import serving

MARKUP = "<img src=x onerror=\"document.title='hurt'\"><b>bold</b> 😀"


def test_the_page_asks_nobody_else():
    text = files("axlearn_plugins_serving.server").joinpath("page.html").read_text("utf-8")
    assert not re.search(r"https?://|//[a-z]|@import|<link|src=", text.replace("http://www.w3.org", ""))
    assert "innerHTML" not in text


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 360])
def test_a_chat_in_a_browser(width, tmp_path):
    engine = FakeEngine(script=list(MARKUP.encode()), max_context=2000, delay=0.01)
    with serving(engine, name="<i>tiny</i>") as server, browser() as page:
        page.size(width, 740)
        page.open(server.url + "/")
        page.wait("document.getElementById('state').textContent === 'ok'")
        assert page.run("document.getElementById('model').textContent") == "<i>tiny</i>"
        page.type("Hello <script>", key="Enter")
        page.wait("document.querySelectorAll('.note').length === 1")
        assert page.run("document.querySelector('.user').textContent") == "Hello <script>"
        assert page.run("document.querySelector('.assistant').firstChild.data") == MARKUP
        assert "tokens" in page.run("document.querySelector('.note').textContent")
        page.type("Again", key="Enter")
        page.wait("document.querySelectorAll('.note').length === 2")
        assert bytes(t for t in engine.seen[-1].prompt if t < 256).count(b"Assistant:") == 2
        page.wait("[...document.querySelectorAll('dd')].some(e => e.textContent.endsWith('of 512'))")
        assert page.run("document.title") == "axlearn serve"
        assert page.run("document.querySelectorAll('#messages img, #messages b, header i').length") == 0
        assert page.run("document.documentElement.scrollWidth") <= width
        (tmp_path / "page.png").write_bytes(page.picture())
        requests = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        assert requests
        assert all(url.startswith((server.url, "about:")) for url in requests)
        wrong = [e for e in page.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        hints = ("favicon", "'level': 'verbose'")
        assert [w for w in wrong if not any(hint in str(w) for hint in hints)] == []


@pytest.mark.slow
@needs_browser
def test_stopping_and_errors_in_a_browser():
    engine = FakeEngine(script=[65] * 100_000, max_context=100_000, delay=0.002)
    with serving(engine, limits=ServerLimits(api_keys=("k",))) as server, browser() as page:
        page.open(server.url + "/")
        page.wait("document.getElementById('state').textContent.includes('API key')")
        page.run("document.getElementById('key').value = 'k'; document.getElementById('tokens').value = 90000")
        page.run("document.getElementById('prompt').focus()")
        page.wait("document.getElementById('state').textContent === 'ok'")
        page.type("Go", key="Enter")
        page.wait("document.querySelector('.assistant')?.textContent.length > 50")
        page.run("document.getElementById('send').click()")
        server.wait_until_idle()
        assert engine.free == engine.blocks
        page.run("document.getElementById('tokens').value = 10 ** 9")
        page.run("document.getElementById('prompt').focus()")
        page.type("Too long", key="Enter")
        page.wait("document.querySelector('.error') !== null")
        assert "context has 100000 tokens" in page.run("document.querySelector('.error').textContent")
