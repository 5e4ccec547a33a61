"""The `axlearn train --seed N` option. Does not import JAX."""

import attrs

from axlearn_core.extend import CommandOption, Request, Setting, parse_value


def set_seed(value: str, request: Request) -> Request:
    """Return the request with this seed."""
    location = f"--seed {value}"
    setting = Setting(path="seed", value=parse_value(value, location), location=location)
    return attrs.evolve(request, settings=(*request.settings, setting))


SEED = CommandOption(help="Seed of the run. Short for --set seed=N.", metavar="N", change=set_seed)
