"""Length scaling of rotary frequencies, for texts that are longer than those that the model was trained on.

Each scaling is a node that builds a function of the unscaled frequencies. The scalings are those of Hugging Face's
configs, so `rope_scaling` entries carry over: `linear`, `yarn`, `llama3`, `proportional`, and `ntk`, which is `dynamic` at a
fixed length.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from axlearn_core.config import REQUIRED, Node, node, setting
from axlearn_core.errors import Problem


class Frequencies(NamedTuple):
    """Frequencies of a rotary embedding.

    Attributes:
        radians: Radians per position of each pair, float64 [head_dim / 2].
        factor: Factor applied to cosines and sines.
    """

    radians: np.ndarray
    factor: float = 1.0


def base_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return theta ** (-2i / head_dim) for each pair i: float64 [head_dim / 2].

    See Su et al., 2021.
    """
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


class Scaling(Protocol):
    """Scales the frequencies of a rotary embedding."""

    def __call__(self, head_dim: int, theta: float, /) -> Frequencies:
        """Return the scaled frequencies for a head size and a base."""
        ...


@node
class LinearScaling(Node[Scaling]):
    """Position interpolation (Chen et al., 2023): divides all positions by `factor`."""

    factor: float = setting(default=REQUIRED, ge=1)

    def build(self, **_: Any) -> Scaling:
        """Return the scaling function."""
        return lambda head_dim, theta: Frequencies(base_frequencies(head_dim, theta) / self.factor)


@node
class ProportionalScaling(Node[Scaling]):
    """Rotates only the fastest pairs of a head, with the frequencies of a whole head (Gemma 4).

    `fraction` of the rotary embedding also limits the rotation to some elements, but gives them the frequencies of a head of
    their size, and takes them from the beginning of the head.

    Attributes:
        fraction: Share of the pairs that rotate, rounded down to whole pairs.
        factor: Number that divides all positions, or None.
    """

    fraction: float = setting(default=1.0, gt=0, le=1)
    factor: float | None = setting(default=None, ge=1)

    def build(self, **_: Any) -> Scaling:
        """Return the scaling function."""

        def scale_frequencies(head_dim: int, theta: float) -> Frequencies:
            rotates = np.arange(head_dim // 2) < int(self.fraction * head_dim // 2)
            return Frequencies(np.where(rotates, base_frequencies(head_dim, theta) / (self.factor or 1.0), 0.0))

        return scale_frequencies


@node
class NTKScaling(Node[Scaling]):
    """NTK-aware scaling: theta * factor ** (d / (d - 2)).

    Only the slowest pair is scaled by the full factor.
    """

    factor: float = setting(default=REQUIRED, ge=1)

    def build(self, **_: Any) -> Scaling:
        """Return the scaling function."""

        def scale_frequencies(head_dim: int, theta: float) -> Frequencies:
            exponent = head_dim / max(head_dim - 2, 1)
            return Frequencies(base_frequencies(head_dim, theta * self.factor**exponent))

        return scale_frequencies


@node
class YarnScaling(Node[Scaling]):
    """YaRN: interpolates slow pairs, keeps fast pairs, and sharpens attention.

    Pairs in between are blended (Peng et al., 2023).

    Attributes:
        factor: Scaling factor.
        original_length: Length that the model was trained on.
        beta_fast: Rotations over `original_length` above which a pair is kept.
        beta_slow: Rotations over `original_length` below which a pair is interpolated.
        attention_factor: Factor applied to cosines and sines (default: 0.1 ln(factor) + 1).
        truncate: Round the ends of the blend to whole pairs.
    """

    factor: float = setting(default=REQUIRED, ge=1)
    original_length: int = setting(default=REQUIRED, ge=1)
    beta_fast: float = setting(default=32.0, gt=0)
    beta_slow: float = setting(default=1.0, gt=0)
    attention_factor: float | None = setting(default=None, gt=0)
    truncate: bool = True

    def validate(self) -> Iterable[Problem]:
        """Check that `beta_slow` is at most `beta_fast`. They are equal in Kimi K2."""
        if self.beta_slow > self.beta_fast:
            yield Problem(path="beta_slow", message="must be at most beta_fast", got=str(self.beta_slow))

    def build(self, **_: Any) -> Scaling:
        """Return the scaling function."""

        def scale_frequencies(head_dim: int, theta: float) -> Frequencies:
            def pair(rotations: float) -> float:
                """Return the index of the pair with this many rotations over the original length."""
                return head_dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            low, high = pair(self.beta_fast), pair(self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            high = high + 0.001 if low == high else high
            stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
            radians = base_frequencies(head_dim, theta)
            factor = self.attention_factor or 0.1 * math.log(self.factor) + 1
            return Frequencies(radians * (stretched / self.factor + 1 - stretched), factor)

        return scale_frequencies


@node
class Llama3Scaling(Node[Scaling]):
    """The scaling of Llama 3.1: by wavelength, with a smooth transition.

    See Grattafiori et al., 2024. Pairs with a wavelength above original_length / low_frequency_factor are scaled by
    `factor`. Pairs with a wavelength below original_length / high_frequency_factor stay unchanged.
    """

    factor: float = setting(default=8.0, ge=1)
    original_length: int = setting(default=8192, ge=1)
    low_frequency_factor: float = setting(default=1.0, gt=0)
    high_frequency_factor: float = setting(default=4.0, gt=0)

    def validate(self) -> Iterable[Problem]:
        """Check that `low_frequency_factor` is at most `high_frequency_factor`. They are equal in Llama 4 Scout."""
        if self.low_frequency_factor > self.high_frequency_factor:
            yield Problem(
                path="low_frequency_factor",
                message="must be at most high_frequency_factor",
                got=str(self.low_frequency_factor),
            )

    def build(self, **_: Any) -> Scaling:
        """Return the scaling function."""

        def scale_frequencies(head_dim: int, theta: float) -> Frequencies:
            radians = base_frequencies(head_dim, theta)
            rotations = self.original_length * radians / (2 * math.pi)
            span = max(self.high_frequency_factor - self.low_frequency_factor, 1e-12)
            weight = np.clip((rotations - self.low_frequency_factor) / span, 0, 1)
            return Frequencies(radians * (weight + (1 - weight) / self.factor))

        return scale_frequencies
