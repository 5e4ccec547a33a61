"""Options of `axlearn train` that stand for the feature `shadow` and its settings. Imports no JAX."""

from typing import Any

import attrs

from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.request import FeatureUse, Request, parse_value


def _with_shadow(request: Request, location: str, **options: Any) -> Request:
    """The request with options of the feature `shadow`; the resolver merges them with others of the same feature."""
    use = FeatureUse(name="shadow", options=options, location=location)
    return attrs.evolve(request, features=(*request.features, use))


def _compare_with(feature: str, request: Request) -> Request:
    return _with_shadow(request, f"--shadow {feature}", feature=feature)


def _compare_every(steps: str, request: Request) -> Request:
    return _with_shadow(request, f"--every {steps}", every_steps=parse_value(steps, f"--every {steps}"))


SHADOW = CommandOption(
    metavar="FEATURE[:OPTIONS]",
    help="Compute some steps with this feature too, and log the divergence. Short for --with shadow:feature=...",
    change=_compare_with,
)
EVERY = CommandOption(
    metavar="STEPS",
    help="Steps between two comparisons of --shadow (default: 100). Short for --with shadow:every_steps=STEPS.",
    change=_compare_every,
)
