"""Wrong implementations that a suite must catch, and a runner for single tests of a suite."""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest

FAILURES = (AssertionError, pytest.fail.Exception)


@attrs.frozen(kw_only=True)
class Mutant:
    """A wrong implementation.

    Attributes:
        name: Description of the error.
        suite: Suite with the wrong part.
        right: Suite with the correct part.
        test: Test of the suite that fails.
        errors: Other errors that the part may raise, which the correct part does not raise.
        slow: Whether the test takes longer than a few seconds.
    """

    name: str
    suite: type
    right: type
    test: str
    errors: tuple[type[BaseException], ...] = ()
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.suite.__mro__[1].__name__}-{self.name}".replace(" ", "-")


def suite(base: type, config: Any = None, **attributes: Any) -> type:
    """Make a suite for one config, like the author of a plugin."""
    more = {} if config is None else {"config": config}
    return type("Suite", (base,), {**more, **attributes})


def run_test(cls: type, test: str, request: pytest.FixtureRequest) -> None:
    """Run a test of a suite with each of its parameters, like pytest. A skipped test passes."""
    method = getattr(cls, test)
    for arguments in _arguments(cls, method):
        instance = cls()
        try:
            if hasattr(instance, "setup_method"):
                instance.setup_method()
            names = [n for n in inspect.signature(method).parameters if n != "self" and n not in arguments]
            getattr(instance, test)(**arguments, **{n: _fixture(n, request) for n in names})
        except pytest.skip.Exception:
            continue


def _arguments(cls: type, method: Any) -> Iterator[dict[str, Any]]:
    axes = []
    for mark in getattr(method, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [names] if isinstance(names, str) else list(names)
            axes.append([dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in values])
    if "case" in inspect.signature(method).parameters:
        axes.append([{"case": case} for case in cls.cases])
    for parts in itertools.product(*axes):
        yield {name: value for part in parts for name, value in part.items()}


def _fixture(name: str, request: pytest.FixtureRequest) -> Any:
    if name == "tmp_path":  # a new one for each set of parameters
        return request.getfixturevalue("tmp_path_factory").mktemp("mutant")
    return request.getfixturevalue(name)


def mutants(right: type, wrong: Mapping[str, tuple[type, str]], **options: Any) -> list[Mutant]:
    """Mutants of one part: description -> (suite with the wrong part, the test that fails)."""
    return [Mutant(name=n, suite=s, right=right, test=t, **options) for n, (s, t) in wrong.items()]
