"""An option that a plugin adds to a command of another one. Imports no JAX."""

from collections.abc import Mapping

import attrs
from immutabledict import immutabledict


def _frozen(names: Mapping[str, str]) -> Mapping[str, str]:
    return immutabledict(names)


@attrs.frozen(kw_only=True)
class CommandOption:
    """An option; given by the user, it takes over what the command does, unless it belongs to another one.

    Attributes:
        name: as it is written: `--search`.
        help: one line for `--help`.
        metavar: what stands for its value in `--help`; None makes it a flag.
        run: `"module:function"`, loaded when the option is given. It is called with the option's value (True for a flag)
            and, by name, with everything that the command's own function takes. Not needed where `belongs_to` is set.
        belongs_to: the name of the option of the same plugin whose function gets this one's value too, by the name of this
            option without dashes in front (`--export` as `export`): None or False where it was not given.
        beside: name of another option that takes over -> what runs where both are given, as `run`: with this option's value and
            those of the options that belong to it. Without an entry the two cannot be given together.
    """

    name: str
    help: str
    run: str = ""
    metavar: str | None = None
    belongs_to: str | None = None
    beside: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen)
