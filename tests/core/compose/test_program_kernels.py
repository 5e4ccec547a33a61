"""The error about a kernel that a config names contains the path of the setting."""

import jax
import pytest

from axlearn_core.compose import compose
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import choose
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_transformer.kernels.attention import AttentionOp
from axlearn_plugins_transformer.kernels.masks import Causal

KERNEL = "model.decoder.layer.attention.kernel"


def choose_in_program(kernel, **settings):
    program = compose(resolve("quickstart", set=settings).config, jax.devices()[:1])
    x = jax.numpy.ones((1, 4, 2, 8))
    with program.tracing("train"):
        choose(AttentionOp(x, x, x, mask=Causal(), scale=1.0), kernel)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("splash", r"kernel 'splash' cannot do this\n(.*\n)+ *splash: runs on tpu, not on cpu\n"),
        ("xla-bloked", r"unknown attention kernel 'xla-bloked'\n *did you mean: xla-blocked\?\n *known: .*\n"),
    ],
)
def test_the_error_contains_the_path(kernel, message):
    with pytest.raises(RequestError, match=rf"{message} *path: {KERNEL}\n *fix: "):
        choose_in_program(kernel, **{KERNEL: kernel})


def test_a_kernel_that_the_config_does_not_name_has_no_path():
    with pytest.raises(RequestError, match="unknown attention kernel 'other'") as error:
        choose_in_program("other")
    assert "path:" not in str(error.value)
