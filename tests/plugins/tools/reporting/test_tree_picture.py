import re

from axlearn_core.cli.config import text
from axlearn_core.config import diff
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_tools.reporting.tree_picture import render_diff


def picture(**changes):
    old, new = resolve("quickstart"), resolve("quickstart", **changes)
    actual = diff(old.config, new.config, new.names.display_name)
    return render_diff("a < b", new.config, actual, new.names.display_name, text)


def boxes(page, kind):
    return [re.sub("<[^>]+>", " ", g) for g in re.findall(rf'<g class="{kind}">(.*?)</g>', page)]


def test_only_what_differs_is_green_and_says_how():
    page = picture(with_=["rope:theta=5000"], set={"model.decoder.num_layers": 3})
    (decoder,), (rope,) = ([b for b in boxes(page, "changed") if name in b] for name in ("decoder: decoder", "rope"))
    assert "num_layers = 3 (was 4)" in decoder
    assert "theta = 5000.0 (was 10000.0)" in rope
    assert len(boxes(page, "changed")) == 2
    assert "2 of" in page
    assert "a &lt; b" in page


def test_every_node_is_drawn_once_and_none_overlap():
    page = picture(set={"model.decoder.head": None})
    rects = [
        tuple(map(float, r))
        for r in re.findall(r'<rect class="box" x="(\d+)" y="([\d.]+)" width="(\d+)" height="(\d+)"', page)
    ]
    assert len(rects) == len(boxes(page, "same")) + len(boxes(page, "changed"))
    for i, (x, y, w, h) in enumerate(rects):
        for a, b, c, d in rects[i + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y
    (decoder,) = boxes(page, "changed")
    assert re.search(r"head = null \(was|- head", decoder)


def test_equal_configs_have_nothing_green():
    assert not boxes(picture(), "changed")
