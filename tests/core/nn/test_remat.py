"""Named remat policies of plugins, by which the feature `remat` sets stacks."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, PluginError, RequestError
from axlearn_core.nn.remat import Remat, tag
from axlearn_plugins_tools.features.remat import UseRemat
from axlearn_plugins_tools.features.remat_tags import RematPolicyTags
from axlearn_plugins_transformer.stack import Stack

POLICY = """
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_remat_policies():
    return [RematPolicy(name="{0}", save=("query|key", "mlp_.*"), offload=("context",))]
"""


def test_a_remat_policy_of_a_plugin(install):
    install("a-chip", modules={"chip_part": POLICY.format("chip")}, points={"plugins": {"chip": "chip_part"}})
    expected = RematPolicyTags.Config(save=("query|key", "mlp_.*"), offload=("context",))
    assert UseRemat(policy="chip").apply(Stack.Config()) == Stack.Config(remat=expected)
    with pytest.raises(ConfigError, match=r"policy: no such policy\n.*'chop'\n.*'chip'.*\n.*did you mean: chip"):
        check(UseRemat(policy="chop"))


def test_a_policy_does_not_miss_the_tags_that_a_layer_does_not_have():
    for node, missed in (
        (RematPolicyTags.Config(save=("query", "key")), False),
        (Remat.Config(save=("query", "key")), True),
    ):
        remat = node.build()
        jax.grad(remat.wrap(lambda x: jnp.sum(tag(jnp.sin(x), "query")), in_loop=False))(jnp.ones(3))
        with pytest.raises(RequestError, match="'key'") if missed else contextlib.nullcontext():
            remat.check()


def test_remat_policies_with_one_name(install):
    install("a-chip", modules={"chip_part": POLICY.format("full")}, points={"plugins": {"chip": "chip_part"}})
    with pytest.raises(PluginError, match="'full' is claimed by the feature remat itself and by chip of a-chip"):
        check(UseRemat(policy="chip"))


@pytest.mark.parametrize(
    ("save", "saved_tags"),
    [(("mlp_.*",), ["mlp_up", "mlp_out"]), (("mlp_o..", "query"), ["query", "mlp_out"]), (("mlp",), [])],
)
def test_patterns_fit_whole_tags(save, saved_tags, capsys):
    def layer(x):
        for name in ("query", "mlp_up", "mlp_out"):
            x = tag(jnp.sin(x), name)
        return jnp.sum(jnp.sin(x))

    remat = Remat.Config(save=save).build()
    wrapped = remat.wrap(layer, in_loop=False)
    x = jnp.linspace(0.1, 1.0, 5)
    assert jnp.allclose(jax.grad(wrapped)(x), jax.grad(layer)(x))
    capsys.readouterr()
    print_saved_residuals(wrapped, x)
    printed = capsys.readouterr().out
    assert [name for name in ("query", "mlp_up", "mlp_out") if f"'{name}'" in printed] == saved_tags
