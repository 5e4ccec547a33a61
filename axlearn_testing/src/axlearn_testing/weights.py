"""Suite for weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from axlearn_core.compose import Functional
from axlearn_core.config import Node
from axlearn_core.contracts.parts import Weights
from axlearn_core.errors import RequestError
from axlearn_testing.common import assert_equal, need_devices

DEVICES = 8


class WeightsSuite:
    """Tests that every implementation of `Weights` must pass; see `axlearn_core.contracts.parts.Weights`.

    Subclasses define a `weights` method, which opens the weights to test.
    """

    def weights(self, tmp_path: Path) -> Weights:
        """Open the weights of a small model. Tests open them more than once.

        Args:
            tmp_path: Directory of the test, for files that must be written first.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `weights(tmp_path)`")

    def test_properties_are_valid(self, tmp_path: Path) -> None:
        weights = self.weights(tmp_path)
        assert isinstance(weights.experiment, Node)
        assert isinstance(weights.config, Node)
        assert type(weights.step) is int
        assert weights.step >= 0
        tokenizer = weights.tokenizer
        assert tokenizer is None or max(tokenizer.encode("a"), default=0) < tokenizer.vocab_size

    def test_specs_match_model(self, tmp_path: Path) -> None:
        weights = self.weights(tmp_path)
        model = Functional.from_config(weights.config)
        expected = {p: (x.shape, x.dtype) for p, x in {**model.abstract, **model.variables}.items()}
        assert {p: (x.shape, x.dtype) for p, x in weights.specs().items()} == expected

    def test_tensors_match_specs(self, tmp_path: Path) -> None:
        weights = self.weights(tmp_path)
        specs, tensors = weights.specs(), weights.read()
        assert {p: (x.shape, x.dtype) for p, x in tensors.items()} == {p: (x.shape, x.dtype) for p, x in specs.items()}
        for path, tensor in tensors.items():
            assert isinstance(tensor, jax.Array), path
            assert tensor.sharding.device_set == {jax.local_devices()[0]}, f"{path} is not on the default device"
            assert np.isfinite(np.asarray(tensor, np.float64)).all(), f"{path} has non-finite values"
        assert_equal(self.weights(tmp_path).read(), tensors, "opened again")

    def test_pattern_selects_tensors(self, tmp_path: Path) -> None:
        weights = self.weights(tmp_path)
        everything = weights.read()
        first, *rest = everything
        assert_equal(weights.read(first), {first: everything[first]}, "one path")
        last = first.rpartition(".")[2]
        expected = {p: x for p, x in everything.items() if p.rpartition(".")[2] == last}
        assert_equal(weights.read(f"**.{last}" if "." in first else last), expected, f"all paths that end with {last}")
        if rest:
            place = SingleDeviceSharding(jax.local_devices()[0])
            assert_equal(
                weights.read(rest[-1], dict.fromkeys(everything, place)), {rest[-1]: everything[rest[-1]]}, "one"
            )

    def test_shardings_do_not_change_values(self, tmp_path: Path) -> None:
        need_devices(DEVICES)
        weights = self.weights(tmp_path)
        mesh = Mesh(jax.devices()[:DEVICES], ("data",))
        shardings: dict[str, Sharding] = {p: _split(mesh, x.shape) for p, x in weights.specs().items()}
        tensors = weights.read("**", shardings)
        for path, tensor in tensors.items():
            assert tensor.sharding.is_equivalent_to(shardings[path], tensor.ndim), f"{path}: {tensor.sharding}"
        assert_equal(tensors, weights.read(), "eight devices and one")

    def test_invalid_requests_raise(self, tmp_path: Path) -> None:
        weights = self.weights(tmp_path)
        place: Any = SingleDeviceSharding(jax.local_devices()[0])
        places: dict[str, Any] = dict.fromkeys(weights.specs(), place)
        first = next(iter(places))
        without = {p: s for p, s in places.items() if p != first}
        requests: tuple[tuple[str, str, Any], ...] = (
            ("a pattern that fits no tensor", "no.such.tensor", None),
            ("a tensor without a sharding", "**", without),
            ("a sharding for an unknown path", "**", {**places, "no.such.tensor": place}),
        )
        for message, pattern, shardings in requests:
            try:
                weights.read(pattern, shardings)
            except RequestError:
                continue
            pytest.fail(f"{message} was not refused")


def _split(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Shard the first dimension that is a multiple of the number of devices, or replicate if there is none."""
    axes = [size % DEVICES == 0 and size > 0 for size in shape]
    spec = [None] * axes.index(True) + ["data"] if any(axes) else []
    return NamedSharding(mesh, PartitionSpec(*spec))
