"""The result of one check of `axlearn plugins doctor`. Imports no JAX."""

import attrs


@attrs.frozen(kw_only=True)
class Finding:
    """The result for one entry point, or of one check that a plugin adds with the hook `axlearn_doctor_checks`.

    Attributes:
        name: of the entry point, or of what the check looked at.
        group: of the entry point; a check names the kind of thing that it looks at.
        distribution: that has it; empty in a check's finding stands for the distribution of the check.
        version: of the distribution.
        status: `ok`, `warning`, `error` or `blocked`.
        message: what is wrong and how to repair it.
    """

    name: str
    group: str = "check"
    distribution: str = ""
    version: str = ""
    status: str
    message: str = ""
