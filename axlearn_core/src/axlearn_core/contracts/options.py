"""An option that a plugin adds to a command of another one. Imports no JAX."""

import attrs


@attrs.frozen(kw_only=True)
class CommandOption:
    """An option; given by the user, it takes over what the command does.

    Attributes:
        name: as it is written: `--search`.
        help: one line for `--help`.
        metavar: what stands for its value in `--help`; None makes it a flag.
        run: `"module:function"`, loaded when the option is given. It is called with the option's value (True for a flag)
            and, by name, with everything that the command's own function takes.
    """

    name: str
    help: str
    run: str
    metavar: str | None = None
