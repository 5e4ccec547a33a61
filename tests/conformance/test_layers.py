"""Every installed layer passes its suite."""

import pytest

from axlearn_testing import LayerSuite, find_contract
from support import installed_parts
from support.plugin_contracts import CONTRACTS, REFERENCES

WHOLE = (
    "attention", "gated-delta-net", "gated-feed-forward", "latent-attention", "linear", "mixture-of-experts", "rms-norm",
    "transformer-layer",
)  # fmt: skip
"""Layers that run all tests in the default suite. The others share code with them, so some of their tests are slow."""
SLOW = ("test_outputs_are_finite[bfloat16]", "test_remat_*")
RELATIVES = ("dropout-transformer-layer", "extended-transformer-layer", "mamba2", "parallel-transformer-layer")
"""Layers that also run their mesh tests as slow tests."""

for _name, _config in installed_parts.layers().items():
    _contract = find_contract(_config, CONTRACTS)
    _more = {"contract": _contract, "meshes": 1, **REFERENCES.get(_name, {})}
    if _contract is not None and _contract.name in (
        "decoder",
        "images",
        "model",
    ):  # composed of the others, and slow to compile
        _more["pytestmark"] = pytest.mark.slow
    elif _name not in WHOLE:
        _more["pytestmark"] = pytest.mark.slow_cases(*SLOW, *(["test_meshes_*"] if _name in RELATIVES else []))
    globals().update(installed_parts.make_suites(LayerSuite, {_name: _config}, **_more))


@pytest.mark.exhaustive
class TestManyMeshes:
    """The same with more meshes."""

    @pytest.mark.parametrize("name", installed_parts.layers())
    def test_meshes_give_equal_results(self, name):
        config = installed_parts.layers()[name]
        more = {"config": config, "contract": find_contract(config, CONTRACTS), "meshes": 5, "seed": 1}
        type(name, (LayerSuite,), more)().test_meshes_give_equal_results()
