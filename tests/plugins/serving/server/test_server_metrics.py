"""Metrics under our names and vLLM's."""

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from axlearn_plugins_serving.server.server_metrics import VLLM_NAMES
from support.fake_engine import FakeEngine
from support.paths import ROOT
from support.server_thread import serving


def samples(url):
    """Return (name, labels) -> value of each sample but those with the time of creation."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
        if not s.name.endswith("_created")
    }


@pytest.fixture(scope="module")
def measured():
    engine = FakeEngine(script=[65] * 100_000, max_context=4000, max_running=1, delay=0.001)
    with serving(engine) as server:
        for prompt, count in (("abc", 5), ("abcdef", 2)):
            httpx.post(server.url + "/v1/completions", json={"prompt": prompt, "max_tokens": count}).raise_for_status()
        stop = {"prompt": "abc", "max_tokens": 50, "stop": "AAA", "n": 2}
        httpx.post(server.url + "/v1/completions", json=stop).raise_for_status()
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 3000, "stream": True}
        ) as r:
            next(r.iter_lines())
        server.wait_until_idle()
        yield samples(server.url)


def value(measured, name, **labels):
    return measured[name, tuple(sorted({"model_name": "tiny", **labels}.items()))]


def test_each_metric_has_the_model_as_a_label(measured):
    assert {dict(labels)["model_name"] for _, labels in measured} == {"tiny"}


def test_names_of_vllm_repeat_our_values(measured):
    repeated = 0
    for (name, labels), number in measured.items():
        if name.startswith("axlearn_"):
            base, suffix = re.fullmatch(r"axlearn_(.*?)(_total|_bucket|_sum|_count)?", name).groups()
            if base in VLLM_NAMES:
                repeated += 1
                assert measured[f"vllm:{VLLM_NAMES[base]}{suffix or ''}", labels] == number
    assert {name.partition(":")[0] for name, _ in measured} == {
        "vllm",
        *[n for n, _ in measured if n.startswith("axlearn_")],
    }
    assert repeated > 100


def test_the_page_maps_each_name(measured):
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    rows = {tuple(re.findall(r"`(axlearn_\w+|vllm:\w+)`", line)) for line in page.splitlines() if "`axlearn_" in line}
    families = {
        name: {n for n, _ in measured if re.fullmatch(f"axlearn_{name}(_total|_bucket)?", n)} for name in VLLM_NAMES
    }
    for name, vllm in VLLM_NAMES.items():
        (ours,) = families[name]
        suffix = "_total" if ours.endswith("_total") else ""
        assert (ours.removesuffix("_bucket"), f"vllm:{vllm}{suffix}") in rows


def test_tokens_and_reasons_are_counted(measured):
    assert value(measured, "vllm:prompt_tokens_total") == 3 + 6 + 3 * 2 + 1
    assert value(measured, "vllm:request_success_total", finished_reason="length") == 2
    assert value(measured, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(measured, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(measured, "vllm:kv_cache_usage_perc") == 0
    assert value(measured, "vllm:num_requests_running") == 0


def test_phases_add_up_to_the_whole(measured):
    phases = [value(measured, f"axlearn_{name}_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert all(seconds >= 0 for seconds in phases)
    assert sum(phases) == pytest.approx(value(measured, "axlearn_request_seconds_sum"), abs=0.01)
    assert value(measured, "axlearn_queue_seconds_count") == 3  # the aborted request is not measured
    assert value(measured, "vllm:inter_token_latency_seconds_count") >= 2
