"""The page, in a real browser."""

import json
import re
from importlib.resources import files

import pytest

from axlearn_plugins_serving.server.limits import ServerLimits
from support.browser import browser, needs_browser
from support.fake_engine import FakeEngine
from support.scripted_models import WEATHER, hermes_template, prompt_of
from support.server_thread import serving

MARKUP = "<img src=x onerror=\"document.title='hurt'\"><b>bold</b> 😀"


def test_the_page_asks_nobody_else():
    text = files("axlearn_plugins_serving.server").joinpath("page.html").read_text("utf-8")
    assert not re.search(r"https?://|//[a-z]|@import|<link|src=", text.replace("http://www.w3.org", ""))
    assert "innerHTML" not in text


def test_the_page_fits_a_phone():
    text = files("axlearn_plugins_serving.server").joinpath("page.html").read_text("utf-8")
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text


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
        assert page.run("document.querySelector('.assistant .text').textContent") == MARKUP
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
        page.run("document.getElementById('tokens').value = 10; document.querySelector('.error button').click()")
        page.wait("document.querySelectorAll('.note').length === 2")
        assert page.run("document.querySelector('.error')") is None
        assert prompt_of(engine.seen[-1]).count("Too long") == 1


REPORT = '{"sky": "sunny", "max": 31}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'


def report_weather(request):
    """Call the tool twice, then answer."""
    if "<|tool|>" in prompt_of(request):
        return list(b"<think>\nI see.\n</think>\n\nIt is sunny.")
    return list(f"<think>\nHm.\n</think>\n\nOne moment.{CALL}{CALL}".encode())


def set_value(page, name, value):
    page.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 360])
def test_tool_calls_and_reasoning_in_a_browser(width, tmp_path):
    engine = FakeEngine(script=report_weather, max_context=8000, delay=0.01)
    limits = ServerLimits(keep_alive_seconds=0.02)
    with serving(engine, template=hermes_template(tmp_path), limits=limits) as server, browser() as page:
        page.size(width, 740)
        page.open(server.url + "/")
        set_value(page, "tools", json.dumps([WEATHER["function"]]))
        set_value(page, "tokens", 1000)
        page.type("Weather?", key="Enter")
        page.wait("document.querySelector('.reasoning[open]') !== null")
        page.wait("document.querySelector('.results') !== null")
        assert page.run("document.querySelector('.reasoning').open") is False
        assert page.run("document.querySelector('.call pre').textContent") == '{\n  "city": "Rome",\n  "days": 3\n}'
        assert page.run("document.documentElement.scrollWidth") <= width
        page.run("document.getElementById('prompt').focus()")
        page.type("Hurry", key="Enter")
        assert page.run("document.activeElement.closest('.results') !== null")  # the results come first
        page.type(REPORT)
        page.run("document.querySelector('.results button').click()")
        page.wait("document.querySelectorAll('.note').length === 2")
        page.run("document.getElementById('send').click()")
        page.wait("document.querySelectorAll('.note').length === 3")
        history = prompt_of(engine.seen[-1])
        call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
        assert "<|assistant|><think>Hm.</think>One moment." + call * 2 + "<|tool|>" in history
        assert f"<|tool|>{REPORT}<|tool|><|assistant|><think>I see.</think>It is sunny.<|user|>Hurry" in history
        sizes = "[...document.querySelectorAll('textarea, input, select')].map(e => getComputedStyle(e).fontSize)"
        assert set(page.run(sizes)) == {"16px"}
        labels = "[...document.querySelectorAll('textarea, input, select')].filter(e => !e.ariaLabel && !e.labels.length).length"
        assert page.run(labels) == 0


@pytest.mark.slow
@needs_browser
def test_tools_that_are_not_json_are_not_sent_from_a_browser(tmp_path):
    engine = FakeEngine(script=list(b"Hello"), max_context=8000)
    with serving(engine, template=hermes_template(tmp_path)) as server, browser() as page:
        page.size(360, 740)
        page.open(server.url + "/")
        set_value(page, "tools", "[{")
        page.type("Hello", key="Enter")
        page.wait("document.activeElement.id === 'tools'")
        assert "not JSON" in page.run("document.getElementById('tools-error').innerText")
        set_value(page, "tools", "[3]")
        page.run("document.getElementById('panel').click(); document.getElementById('send').click()")
        page.wait("document.querySelector('.error') !== null")
        assert "tools[0]" in page.run("document.querySelector('.error').textContent")
        assert engine.seen == []
