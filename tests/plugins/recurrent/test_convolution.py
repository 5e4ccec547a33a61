import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.nn.layer import Precision
from axlearn_plugins_recurrent.convolution import ShortConvolution
from axlearn_plugins_transformer.recurrence import Reload, Sequences


@pytest.mark.slow_cases("1", "3")
@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_chunks_continue_one_another_or_restart(chunk):
    layer = ShortConvolution.Config(channels=(5,)).build(axes=("embed",), rngs=nnx.Rngs(0), precision=Precision())
    rng, count = np.random.default_rng(0), 12 // chunk
    x = jnp.asarray(rng.normal(size=(1, 12, 5)), jnp.float32)
    states = jnp.asarray(rng.normal(size=(1, count, 3, 5)), jnp.float32)
    middle = count // 2  # the second half continues from a state of its own
    restarts = jnp.asarray([[index in (0, middle) for index in range(count)]])
    y, latest = layer(x, Sequences(reload=Reload(restarts=restarts, states=states, chunk=chunk)), None)
    for half, first in ((slice(0, middle * chunk), 0), (slice(middle * chunk, 12), middle)):
        expected, state = layer(x[:, half], Sequences(), states[:, first])
        np.testing.assert_allclose(y[:, half], expected, atol=1e-6)
        np.testing.assert_allclose(latest[:, half.stop // chunk - 1], state, atol=1e-6)
