"""A shrunk config with its programs, weights and batches, which properties check."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import ModelWeights, Program, compose
from axlearn_core.compose.options import quick_options
from axlearn_core.contracts.target import Target
from axlearn_plugins_verify.prove.shrink import synthetic_batch

_SPREAD = 0.2
"""Standard deviation of random weights. Weights that usually start as zeros or ones are random, too."""


class Case:
    """A config to check, and caches that properties share.

    Attributes:
        config: The shrunk config, `Trainer.Config`.
        original: The config before shrinking.
        meshes: Shapes of meshes that together cover each axis that the config can use.
        seed: Seed for the weights and batches.
        target: Hardware that the request names, or None.
    """

    def __init__(
        self,
        config: Any,
        *,
        original: Any | None = None,
        meshes: Sequence[Mapping[str, int]] = (),
        seed: int = 0,
        programs: dict[Any, Program] | None = None,
        target: Target | None = None,
    ):
        self.config, self.original = config, config if original is None else original
        self.meshes, self.seed, self.target = tuple(meshes), seed, target
        self._programs = {} if programs is None else programs

    def with_seed(self, seed: int) -> "Case":
        """Return the case with different weights and batches, but the same programs."""
        return Case(
            self.config,
            original=self.original,
            meshes=self.meshes,
            seed=seed,
            programs=self._programs,
            target=self.target,
        )

    def program(self, config: Any = None, shape: Mapping[str, int] | None = None) -> Program:
        """Compose a config, or return its program if it has already been composed.

        Args:
            config: Config to compose (default: the case's own).
            shape: Shape of the mesh. None uses one device.
        """
        config = self.config if config is None else config
        shape = dict(shape or {"fsdp": 1})
        options = {**quick_options(jax.default_backend()), **config.mesh.compiler_options}
        config = attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape=shape, compiler_options=options))
        if config not in self._programs:
            count = int(np.prod(list(shape.values())))
            self._programs[config] = compose(config, jax.devices()[:count])
        return self._programs[config]

    def weights(self, config: Any | None = None) -> ModelWeights:
        """Return random weights for the model and the objective of a config.

        The values of an array depend on its path, its shape and the seed, so configs with the same arrays have equal weights.
        Weights in float64 equal those in float32.
        """
        trained = self.program(config).trained
        return ModelWeights(
            {path: self._fill(path, spec) for path, spec in trained.abstract.items()},
            {path: self._fill(path, spec) for path, spec in trained.variables.items()},
        )

    def batch(self, seed: int | None = None, config: Any | None = None) -> dict[str, np.ndarray]:
        """Return a random batch for the input of a config.

        Args:
            seed: Seed to combine with the case's own.
            config: Config with the input (default: the case's own).
        """
        return synthetic_batch(self.config if config is None else config, self.seed * 1000 + (seed or 0))

    def _fill(self, path: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
        rng = np.random.default_rng(
            int.from_bytes(hashlib.sha256(f"{self.seed} {path}".encode()).digest()[:8], "little")
        )
        if jnp.issubdtype(spec.dtype, jnp.floating):
            mean = 1.0 if path.endswith("scale") else 0.0
            values = rng.normal(mean, _SPREAD, spec.shape)
            return jnp.asarray(values.astype(np.float32) if spec.dtype == np.float64 else values, spec.dtype)
        return jnp.zeros(spec.shape, spec.dtype)
