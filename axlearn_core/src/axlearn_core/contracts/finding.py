"""`Finding`: a result from `axlearn plugins doctor`. This module does not import JAX."""

import attrs


@attrs.frozen(kw_only=True)
class Finding:
    """The result for an entry point, or for a check from the `axlearn_doctor_checks` hook.

    Attributes:
        name: Name of the entry point, or of the object that was checked.
        group: Group of the entry point, or the kind of object that was checked.
        distribution: Distribution of the entry point. A check may leave it empty for its own distribution.
        version: Version of the distribution.
        status: `ok`, `warning`, `error`, or `blocked`.
        message: Description of the problem and its fix.
    """

    name: str
    group: str = "check"
    distribution: str = ""
    version: str = ""
    status: str
    message: str = ""
