"""Partitions of arrays, and the advice for a dimension that the mesh does not divide."""

import re

import jax
import pytest
from jax.sharding import PartitionSpec

from axlearn_core.compose import compose
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve


def make_layout(shape, rules):
    config = Mesh(shape=shape, rules=rules)
    return Layout(make_mesh(config, jax.devices()[:8]), config)


def advised_rule(error):
    """Return the axis and the rule that the fix of an error names."""
    axis, mesh_axes = re.search(r"--set mesh\.rules\.(\w+)=\[([\w,]*)\]", error.problems[0].fix).groups()
    return axis, tuple(mesh_axes.split(",")) if mesh_axes else ()


@pytest.mark.parametrize(
    ("size", "axes", "rule", "spec"),
    [
        (12, ["embed"], ("data", "fsdp"), PartitionSpec(("data", "fsdp"))),
        (6, ["embed"], ("data",), PartitionSpec("data")),
        (7, ["embed"], (), PartitionSpec()),
        (6, ["rank", "embed"], ("data", "fsdp"), PartitionSpec("fsdp", "data")),
        (7, ["rank", "embed"], (), PartitionSpec("fsdp")),
    ],
)
def test_the_fix_keeps_the_mesh_axes_that_divide(size, axes, rule, spec):
    """In the last two cases, `fsdp` already shards the first dimension."""
    mesh, rules = {"data": 2, "fsdp": 2, "seq": 2}, {"embed": ("data", "fsdp", "seq"), "rank": ("fsdp",)}
    shape = [8] * (len(axes) - 1) + [size]
    with pytest.raises(ConfigError) as error:
        make_layout(mesh, rules).spec(axes, shape, "weight")
    assert advised_rule(error.value) == ("embed", rule)
    assert make_layout(mesh, {**rules, "embed": rule}).spec(axes, shape, "weight") == spec


def test_a_model_composes_with_the_rule_that_the_fix_names():
    settings = {
        "mesh.shape": {"fsdp": 2, "seq": 2},
        "model.decoder.hidden_dim": 126,
        "model.decoder.layer.attention.head_dim": 16,
    }
    with pytest.raises(ConfigError) as error:
        compose(resolve("quickstart", target="none", set=settings).config, jax.devices()[:4])
    axis, rule = advised_rule(error.value)
    assert (axis, rule) == ("embed", ("fsdp",))
    compose(
        resolve("quickstart", target="none", set={**settings, f"mesh.rules.{axis}": rule}).config, jax.devices()[:4]
    )
