"""The suite for features."""

from typing import Any

from axlearn_core.config import Node, diff
from axlearn_core.config.kinds import change_kinds
from axlearn_core.errors import AxlearnError, ConfigError
from axlearn_core.plugins.feature import STAGES, Feature
from axlearn_core.plugins.order import Order
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve


class FeatureSuite:
    """What every feature keeps.

    Attributes:
        name: the feature, as it is registered.
        options: what follows the name in `--with NAME:OPTIONS`; by default the feature's own `example`.
        experiments: those that it is tried on; by default all that are installed.
        others: the features that it is tried together with; by default all others that are installed.
    """

    name: str
    options: str | None = None
    experiments: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None

    def text(self) -> str:
        """`NAME:OPTIONS`."""
        return self.name if not self.options else f"{self.name}:{self.options}"

    def trees(self) -> tuple[str, ...]:
        """The experiments that it is tried on."""
        return self.experiments or tuple(e.name for e in registry().entries("experiments"))

    def partners(self) -> tuple[str, ...]:
        """`NAME:EXAMPLE` of the features that it is tried together with."""
        every = [e.name for e in registry().entries("features") if e.name != self.name]
        names = every if self.others is None else self.others
        return tuple(_text(n, registry().feature(n)) for n in names)

    def setup_method(self) -> None:
        """Fills in the example."""
        if self.options is None:
            self.options = registry().feature(self.name).example

    def test_its_docstring_says_what_it_does(self) -> None:
        cls = registry().feature(self.name)
        assert vars(cls).get("__doc__"), "the command line prints a feature's docstring, and this one has none"

    def test_its_stage_is_one_of_the_four(self) -> None:
        cls = registry().feature(self.name)
        assert cls.stage in STAGES
        names = {e.name for e in registry().entries("features")}
        assert self.name not in {*cls.needs, *cls.excludes}, "a feature cannot need or exclude itself"
        assert all(isinstance(n, str) for n in (*cls.needs, *cls.excludes)), "needs and excludes name features"
        assert self.name not in {*cls.before, *cls.after}, "a feature cannot come before or after itself"
        assert set(cls.needs) <= names, f"it needs {', '.join(set(cls.needs) - names)}, which is not installed"

    def test_of_the_stage_execute_it_changes_no_mathematics(self) -> None:
        if registry().feature(self.name).stage != "execute":
            return
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.applied_feature(before)
            after = None if feature is None else applied(feature, before, experiment)
            if after is None:
                continue
            for change, kind in change_kinds(diff(before, after), before, after):
                assert kind in ("execution", "microbatches"), f"{experiment}: {change.path} is {kind}"

    def test_twice_is_once_on_every_experiment(self) -> None:
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.applied_feature(before)
            if feature is None:
                continue
            once = applied(feature, before, experiment)
            if once is None:
                continue
            twice = feature.apply(once)
            assert diff(once, twice) == (), f"{experiment}: applied again it changes more"
            assert once != before or feature.in_effect(before), (
                f"{experiment}: it changes nothing, and in_effect() does not say that there was nothing to do"
            )
            assert feature.in_effect(once), f"{experiment}: in_effect() denies what apply() just made"

    def test_it_changes_one_of_the_experiments(self) -> None:
        refusals = []
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.applied_feature(before)
            after = None if feature is None else applied(feature, before, experiment)
            if after is not None and diff(before, after):
                return
            refusals.append(f"{experiment}: {'refused' if after is None else 'nothing to do'}")
        raise AssertionError(
            f"{self.text()} changes none of the experiments: nothing is tried. Set `options`, or `experiments`:\n"
            + "\n".join(refusals[:8])
        )

    def test_the_order_with_any_other_feature_makes_no_difference(self) -> None:
        for experiment in self.trees():
            tree = self.tree(experiment)
            for other in self.partners():
                label = f"{experiment} with {self.text()} and {other}"
                needs = self.needs()
                one, two = resolved(tree, *needs, self.text(), other), resolved(tree, *needs, other, self.text())
                if isinstance(one, Node) and isinstance(two, Node):
                    assert diff(one, two) == (), f"{label}: the tree depends on the order"
                    self._commutes(tree, one, other, label)
                else:
                    assert str(one) == str(two), f"{label}: one order is refused otherwise than the other"

    def _commutes(self, tree: Node[Any], both: Node[Any], other: str, label: str) -> None:
        """Within a stage, without a stated order, it is that of the names, which means nothing: any gives the same tree."""
        features = resolve(tree, with_=[*self.needs(), self.text(), other]).features
        names = (self.name, other.partition(":")[0])
        pair, stated = [f for name, f in features if name in names], Order.of(dict(features), registry()).below
        if len(pair) == 2 and pair[0].stage == pair[1].stage and not any(stated.values()):
            try:
                turned: Any = pair[0].apply(pair[1].apply(tree))
            except AxlearnError as error:
                turned = error
            assert isinstance(turned, Node), (
                f"{label}: in the order that the names do not give, it is refused: {turned}"
            )
            assert diff(both, turned) == (), f"{label}: the tree depends on the names, as both are of one stage"

    def needs(self) -> tuple[str, ...]:
        """`NAME:EXAMPLE` of the features that it needs."""
        return tuple(_text(n, registry().feature(n)) for n in registry().feature(self.name).needs)

    def tree(self, experiment: str) -> Node[Any]:
        """The config of an experiment, with the features that this one needs where they fit."""
        plain = registry().experiment(experiment)
        tree = resolved(plain, *self.needs()) if self.needs() else plain
        return plain if isinstance(tree, AxlearnError) else tree

    def applied_feature(self, tree: Node[Any]) -> Feature | None:
        """The feature with its options; None where the request is refused, with an error that says what to do."""
        result = resolved(tree, *self.needs(), self.text(), whole=True)
        if isinstance(result, AxlearnError):
            assert_helps(result)
            return None
        return next(f for name, f in result.features if name == self.name)


def _text(name: str, cls: type[Feature]) -> str:
    return f"{name}:{cls.example}" if cls.example else name


def resolved(tree: Node[Any], *features: str, whole: bool = False) -> Any:
    """The tree (or all that was resolved) with some features; the error where that is refused."""
    try:
        result = resolve(tree, with_=features)
    except AxlearnError as error:
        return error
    return result if whole else result.config


def applied(feature: Feature, tree: Node[Any], label: str) -> Node[Any] | None:
    """What the feature makes of a tree; None where it refuses, with an error that says what to do."""
    try:
        return feature.apply(tree)
    except ConfigError as error:
        assert_helps(error)
        return None


def assert_helps(error: AxlearnError) -> None:
    """A refusal says what to do."""
    assert any(word in str(error) for word in ("fix:", "did you mean", "expected:")), f"it gives no remedy: {error}"
