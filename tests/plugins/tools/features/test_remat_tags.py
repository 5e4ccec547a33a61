import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from axlearn_core.errors import RequestError
from axlearn_core.nn.remat import tag
from axlearn_plugins_tools.features.remat_tags import RematTags


def layer(x):
    first = tag(jnp.sin(x), "first")
    second = tag(jnp.sin(first * first), "second")
    return jnp.sum(jnp.sin(second * second))


def wrapped(*recompute, in_loop=False):
    return RematTags.Config(recompute=recompute).build().wrap(layer, in_loop=in_loop)


X = jnp.linspace(0.1, 1.0, 5)


@pytest.mark.parametrize(
    ("recompute", "saved_tags"), [((), {"first", "second"}), (("first",), {"second"}), (("first", "second"), set())]
)
def test_every_tag_is_kept_but_those_named(recompute, saved_tags, capsys):
    print_saved_residuals(wrapped(*recompute), X)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert {name for name in ("first", "second") if any(f"'{name}'" in line for line in lines)} == saved_tags
    assert len(lines) == len(saved_tags)  # and nothing that has no tag
    np.testing.assert_allclose(jax.grad(wrapped(*recompute))(X), jax.grad(layer)(X), rtol=1e-6)


def test_a_tag_that_there_is_not():
    instance = RematTags.Config(recompute=("sec.*", "fist")).build()
    jax.eval_shape(instance.wrap(layer, in_loop=True), X)
    with pytest.raises(RequestError, match=r"unknown activation tag in remat 'fist'\n.*did you mean: first"):
        instance.check()


def test_tags_inside_of_calls_and_loops_are_found():
    def looped(x):
        return jax.lax.scan(lambda c, y: (tag(jnp.sin(c), "inner") + y, None), x[0], x)[0]

    remat = RematTags.Config(recompute=("inner",)).build()
    result = remat.wrap(jax.jit(looped), in_loop=True)
    np.testing.assert_allclose(jax.grad(result)(X), jax.grad(looped)(X), rtol=1e-6)
    remat.check()
