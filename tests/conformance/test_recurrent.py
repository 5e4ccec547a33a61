"""Every installed recurrent layer passes its suite."""

from axlearn_core.nn.layer import Layer
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.testing import RecurrentSuite
from support import installed_parts

CONFIGS = {name: config for name, config in installed_parts.layers().items() if isinstance(config, RecurrentRole)}

globals().update(installed_parts.make_suites(RecurrentSuite, CONFIGS))


def test_layers_with_states_are_covered():
    assert {"gated-delta-net", "mamba2", "gated-convolution"} <= CONFIGS.keys()
    assert all(issubclass(type(config).owner, Layer) for config in CONFIGS.values())
