"""The interface of the properties that `axlearn prove` checks."""

from typing import Any, ClassVar, Protocol

import attrs


@attrs.frozen(kw_only=True)
class Difference:
    """The first place where two computations differ by more than the tolerance.

    Attributes:
        layer: Path of the module, such as `decoder.layers.1.attention`, or an empty string if the property compares no layers.
        tensor: Name of the tensor, such as `output`, `loss`, or `gradient of decoder.embedding.weight`.
        error: Relative error of this tensor.
        detail: Further details, such as the position of the first token that differs.
    """

    layer: str
    tensor: str
    error: float
    detail: str = ""


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of one check.

    Attributes:
        error: Largest relative error of the compared values.
        tolerance: Largest relative error that rounding explains.
        compared: What was compared, in one line.
        difference: First difference beyond the tolerance. None if the property holds.
    """

    error: float
    tolerance: float
    compared: str
    difference: Difference | None = None

    @property
    def holds(self) -> bool:
        """Whether the property holds."""
        return self.difference is None


class Property(Protocol):
    """A property of a config, registered under the entry point group `axlearn.properties`.

    Attributes:
        summary: The statement that the property makes, as one sentence for the report.
    """

    summary: ClassVar[str]

    def skip_reason(self, case: Any) -> str | None:
        """Return why the property does not apply to a case, or None if it does.

        Args:
            case: `axlearn_plugins_verify.prove.case.Case`.
        """
        ...

    def check(self, case: Any) -> Outcome:
        """Check the property on a case.

        Args:
            case: `axlearn_plugins_verify.prove.case.Case`.
        """
        ...
