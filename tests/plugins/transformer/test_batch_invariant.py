"""The feature `batch-invariant` selects the batch-invariant kernels of attention and experts."""

import pytest

from axlearn_core.config import find, get
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.batch_invariant import with_invariant_kernels
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, ExpertsKernelRole

LAYER = "model.decoder.layer"


@pytest.mark.parametrize("features", [[], ["mla"], ["moe"], ["interleave"]], ids=str)
def test_attention_and_experts_get_the_kernel(features):
    cfg = resolve("quickstart", with_=[*features, "batch-invariant"]).config
    nodes = {**find(cfg, AttentionKernelRole), **find(cfg, ExpertsKernelRole)}
    assert nodes
    assert {node.kernel for node in nodes.values()} == {"invariant"}
    assert bool(find(cfg, ExpertsKernelRole)) == ("moe" in features)


def test_nothing_else_changes():
    cfg = resolve("quickstart").config
    changed = with_invariant_kernels(cfg)
    assert get(changed, f"{LAYER}.attention.kernel") == "invariant"
    assert get(changed, f"{LAYER}.feed_forward") == get(cfg, f"{LAYER}.feed_forward")
    assert get(changed, "input") == get(cfg, "input")


def test_a_config_without_such_layers_is_refused():
    feed_forward = get(resolve("quickstart").config, f"{LAYER}.feed_forward")
    with pytest.raises(ConfigError, match="batch-invariant finds nothing to set"):
        with_invariant_kernels(feed_forward, feature="batch-invariant")
