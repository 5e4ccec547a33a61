"""The site of this repository: built without a warning, then read in a browser, wide and narrow."""

import subprocess
import threading
import urllib.request

import pytest

from axlearn_plugins_tools.scaffold.site import build_site, open_server
from support.browser import browser, needs_browser
from support.paths import ROOT

WIDEST = """
[...document.querySelectorAll("body *")].filter(e => !e.closest(".table-wrapper *, pre *"))
  .map(e => [e.getBoundingClientRect().right, e.outerHTML.slice(0, 120)]).reduce((a, b) => b[0] > a[0] ? b : a)[1]
"""


def foreign_requests(page, url):
    """Return the URLs of other servers that the browser has asked."""
    requests = {e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"}
    return {r for r in requests if not r.startswith((url, "about:", "data:"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The site, built."""
    return build_site(ROOT, tmp_path_factory.mktemp("built") / "site")


@pytest.fixture(scope="module")
def url(folder):
    """The site, served."""
    with open_server(0) as server:
        thread = threading.Thread(target=server.serve_folder, args=(folder,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_the_window(width, url, folder):
    # The first page only leads to docs/index.html.
    names = sorted(
        {str(f.relative_to(folder)) for f in folder.rglob("*.html") if "_static" not in f.parts} - {"index.html"}
    )
    assert {"docs/index.html", "docs/tutorials/serve.html", "docs/api/config.html", "search.html"} <= {*names}
    wide, broken = {}, {}
    with browser() as page:
        page.size(width, 844)
        for name in names:
            page.open(url + name)
            if page.run("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wide[name] = page.run(WIDEST)
            if images := page.run("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"):
                broken[name] = images
    assert foreign_requests(page, url) == set()
    assert wide == {}, "pages with a horizontal scroll bar, and the element that reaches furthest"
    assert broken == {}, "pages with pictures that do not load"


@pytest.mark.slow
@needs_browser
def test_navigation_and_search_in_a_browser(url):
    with browser() as page:
        page.size(1280, 844)
        page.open(url)
        page.wait("location.pathname === '/docs/index.html' && document.readyState === 'complete'")
        page.run("[...document.querySelectorAll('.sidebar-tree a')].find(a => a.textContent === 'Plans').click()")
        page.wait("location.pathname === '/docs/plan.html'")
        page.open(url + "search.html?q=roofline")
        # Results come one after the other.
        page.wait("[...document.querySelectorAll('#search-results li a')].some(a => a.pathname === '/docs/plan.html')")
        assert foreign_requests(page, url) == set()


@pytest.mark.slow
def test_the_reference_has_what_is_public(url):
    import axlearn_core.config
    import axlearn_testing

    for page, module in (("config", axlearn_core.config), ("testing", axlearn_testing)):
        text = urllib.request.urlopen(f"{url}docs/api/{page}.html").read().decode()
        missing = [n for n in module.__all__ if f"{module.__name__}.{n}" not in text]
        assert not missing


def test_every_page_of_the_reference_is_in_its_index():
    text = (ROOT / "docs/api/index.rst").read_text("utf-8").split()
    assert {p.stem for p in (ROOT / "docs/api").glob("*.rst")} - {"index"} <= set(text)


def test_the_site_is_no_part_of_the_repository():
    command = ["git", "check-ignore", "-q", "build/site"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
