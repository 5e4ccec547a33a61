"""The site of this repository: built without a warning, then read in a browser, wide and narrow."""

import subprocess
import threading
import urllib.request

import pytest

from axlearn_plugins_tools.scaffold.site import build_site, open_server
from support.browser import browser, needs_browser
from support.paths import ROOT

PAGES = ("docs/index.html", "docs/cli.html", "docs/comparison.html", "docs/gallery.html", "docs/tutorials/moving.html")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The site, served."""
    folder = build_site(ROOT, tmp_path_factory.mktemp("built") / "site")
    with open_server(0) as server:
        thread = threading.Thread(target=server.serve_folder, args=(folder,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_site_in_a_browser(width, url):
    with browser() as page:
        page.size(width, 844)
        page.open(url)
        page.wait("location.pathname === '/docs/index.html' && document.readyState === 'complete'")
        for name in PAGES:
            page.open(url + name)
            assert page.run("document.documentElement.scrollWidth") <= width, f"{name} is wider than the window"
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
            assert page.run(broken) == []
        page.open(url + "docs/index.html")
        page.run("[...document.querySelectorAll('.sidebar-tree a')].find(a => a.textContent === 'Plans').click()")
        page.wait("location.pathname === '/docs/plan.html'")
        page.open(url + "search.html?q=roofline")
        # Results come one after the other.
        page.wait("[...document.querySelectorAll('#search-results li a')].some(a => a.pathname === '/docs/plan.html')")
        requests = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
        assert all(r.startswith((url, "about:", "data:")) for r in requests), "the site asks somebody else"


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
