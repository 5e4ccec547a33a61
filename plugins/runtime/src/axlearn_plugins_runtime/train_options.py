"""Options for `axlearn train` that add the `shadow` feature. Does not import JAX."""

from typing import Any

import attrs

from axlearn_core.contracts.options import CommandOption
from axlearn_core.plugins.request import FeatureUse, Request, parse_value


def _with_shadow(request: Request, location: str, **options: Any) -> Request:
    """Add options for the `shadow` feature to a request. The resolver merges all of the feature's options."""
    use = FeatureUse(name="shadow", options=options, location=location)
    return attrs.evolve(request, features=(*request.features, use))


def _compare_with(feature: str, request: Request) -> Request:
    return _with_shadow(request, f"--shadow {feature}", feature=feature)


def _compare_every(steps: str, request: Request) -> Request:
    return _with_shadow(request, f"--every {steps}", every_steps=parse_value(steps, f"--every {steps}"))


SHADOW = CommandOption(
    metavar="FEATURE[:OPTIONS]",
    help="Also run some steps with this feature and log the divergence.",
    change=_compare_with,
)
EVERY = CommandOption(
    metavar="STEPS",
    help="Steps between comparisons of --shadow (default: 100).",
    change=_compare_every,
)
