"""Generated configs with a fixed seed: one error or a result, never a traceback."""

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from axlearn_core.config.yaml_file import parse
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, read_text
from axlearn_core.plugins.resolve import resolve
from support.hostile_configs import FILES, SETTINGS

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}
SEEDS = [text[:2000] for text in FILES.values()]
PATHS = (
    "max_steps", "seed", "model", "model.decoder", "model.decoder.num_layers", "model.decoder.layer.norm", "model.**", "**", "*",
    "input", "input.source", "input.tokenizer", "learner", "learner.optimizer", "trackers", "trackers.0", "evaluators",
    "evaluators.eval", "mesh.shape", "mesh.shape.fsdp", "loop", "checkpointer", "checkpointer.uri", "watchdog", "profiler",
    "objective", "distributed", "type", "resolved", ".", "..", "x",
)  # fmt: skip
PIECES = ("&a ", "*a", "!!int ", "!!float ", "!!bool ", "[", "{", ": ", "\n", "- ", '"', "type: ")
TYPES = sorted(registry().claims["components"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(TYPES)
nodes = st.recursive(
    leaves,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.just("type") | st.sampled_from(PATHS), below, max_size=3)
    ),
    max_leaves=12,
)


def only_ours(function):
    """Runs it; what it raises is one of ours, with a message."""
    try:
        function()
    except AxlearnError as error:
        refusal = error
    else:
        return
    assert isinstance(refusal, RequestError)
    assert str(refusal).strip()


@pytest.mark.slow
@seed(0)
@settings(max_examples=800, **COMMON)
@given(st.text(max_size=300) | st.binary(max_size=100).map(lambda b: b.decode("latin-1")))
def test_any_text_is_parsed_or_refused(text):
    only_ours(lambda: parse(text))


@pytest.mark.slow
@seed(0)
@settings(max_examples=600, **COMMON)
@given(st.data())
def test_a_changed_file_is_read_or_refused(data):
    text = data.draw(st.sampled_from(SEEDS))
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 20))
    text = (
        text[:at]
        + data.draw(st.sampled_from(["&a ", "*a", "!!int ", "[", "{", ": ", "\n", "- ", '"', "type: "]))
        + text[at + cut :]
    )
    only_ours(lambda: read_text(text, "run.yaml", registry()))


@pytest.mark.slow
@seed(0)
@settings(max_examples=600, **COMMON)
@given(st.sampled_from(PATHS) | st.text(max_size=12), nodes)
def test_any_value_is_set_or_refused(path, value):
    only_ours(lambda: resolve(Request.from_arguments("quickstart", set={path: value})).check())


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_settings_at_once_are_set_or_refused(setting):
    for other in SETTINGS:
        only_ours(lambda other=other: resolve(Request.from_arguments("quickstart", set=[setting, other])).check())
