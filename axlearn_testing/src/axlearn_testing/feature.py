"""Suite for features."""

from typing import Any

from axlearn_core.config import Node, diff, find
from axlearn_core.config.kinds import change_kinds
from axlearn_core.errors import AxlearnError, ConfigError
from axlearn_core.plugins.feature import STAGES, Feature
from axlearn_core.plugins.order import Order
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_testing.dropped import add_needs, feature_text, find_dropped_or_refusal, needed_features


class FeatureSuite:
    """Tests that every feature must pass.

    Attributes:
        name: Registered name of the feature.
        options: Options after the name in `--with NAME:OPTIONS`; the default is the feature's `example`.
        experiments: Experiments to test the feature on; the default is all installed experiments, and for pairs of features a
            few experiments that together have every component of the others.
        others: Features to combine it with; the default is all other installed features.
    """

    name: str
    options: str | None = None
    experiments: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None

    def text(self) -> str:
        """Return `NAME:OPTIONS`."""
        return self.name if not self.options else f"{self.name}:{self.options}"

    def trees(self) -> tuple[str, ...]:
        """Return the names of the experiments to test on."""
        return self.experiments or tuple(e.name for e in registry().entries("experiments"))

    def trees_of_pairs(self) -> tuple[str, ...]:
        """Return the names of the experiments to test pairs of features on."""
        return self.experiments or select_experiments()

    def partners(self) -> tuple[str, ...]:
        """Return `NAME:EXAMPLE` for each feature to combine this feature with."""
        all_names = [e.name for e in registry().entries("features") if e.name != self.name]
        names = all_names if self.others is None else self.others
        return tuple(feature_text(name) for name in names)

    def setup_method(self) -> None:
        """Set `options` to the feature's example if it is None."""
        if self.options is None:
            self.options = registry().feature(self.name).example

    def test_feature_has_docstring(self) -> None:
        cls = registry().feature(self.name)
        assert vars(cls).get("__doc__"), "the feature needs a docstring, because the command line prints it"

    def test_stage_and_relations_are_valid(self) -> None:
        cls = registry().feature(self.name)
        assert cls.stage in STAGES
        names = {e.name for e in registry().entries("features")}
        assert self.name not in {*cls.needs, *cls.excludes}, "a feature cannot need or exclude itself"
        assert all(isinstance(n, str) for n in (*cls.needs, *cls.excludes)), "needs and excludes name features"
        assert self.name not in {*cls.before, *cls.after}, "a feature cannot come before or after itself"
        assert set(cls.needs) <= names, f"it needs {', '.join(set(cls.needs) - names)}, which is not installed"

    def test_execute_stage_keeps_mathematics(self) -> None:
        if registry().feature(self.name).stage != "execute":
            return
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.find_feature(before)
            after = None if feature is None else apply_feature(feature, before, experiment)
            if after is None:
                continue
            for change, kind in change_kinds(diff(before, after), before, after):
                assert kind in ("execution", "microbatches"), f"{experiment}: {change.path} is {kind}"

    def test_apply_is_idempotent(self) -> None:
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.find_feature(before)
            if feature is None:
                continue
            first = apply_feature(feature, before, experiment)
            if first is None:
                continue
            second = feature.apply(first)
            assert diff(first, second) == (), f"{experiment}: applying it twice changes more than applying it once"
            assert first != before or feature.in_effect(before), (
                f"{experiment}: it changes nothing, but in_effect() was False before"
            )
            assert feature.in_effect(first), f"{experiment}: in_effect() is False after apply()"

    def test_feature_changes_an_experiment(self) -> None:
        refusals = []
        for experiment in self.trees():
            before = self.tree(experiment)
            feature = self.find_feature(before)
            after = None if feature is None else apply_feature(feature, before, experiment)
            if after is not None and diff(before, after):
                return
            refusals.append(f"{experiment}: {'refused' if after is None else 'nothing to do'}")
        raise AssertionError(
            f"{self.text()} changes none of the experiments, so nothing is tested. Set `options` or `experiments`:\n"
            + "\n".join(refusals[:8])
        )

    def test_order_of_features_does_not_matter(self) -> None:
        for experiment in self.trees_of_pairs():
            tree = self.tree(experiment)
            for other in self.partners():
                label = f"{experiment} with {self.text()} and {other}"
                needs = self.needs()
                one, two = (
                    resolve_features(tree, *needs, self.text(), other),
                    resolve_features(tree, *needs, other, self.text()),
                )
                if isinstance(one, Node) and isinstance(two, Node):
                    assert diff(one, two) == (), f"{label}: the config depends on the order"
                    self._commutes(tree, one, other, label)
                else:
                    assert str(one) == str(two), f"{label}: the two orders are refused with different errors"

    def test_no_feature_drops_another(self) -> None:
        for experiment in self.trees_of_pairs():
            tree = registry().experiment(experiment)
            for other in self.partners():
                for first, second in ((self.text(), other), (other, self.text())):
                    dropped = find_dropped_or_refusal(tree, first, second)
                    if isinstance(dropped, AxlearnError):
                        assert_helps(dropped)
                        names = [text.partition(":")[0] for text in add_needs(first, second)]
                        assert any(repr(n) in str(dropped) for n in names), f"the refusal names no feature: {dropped}"
                    else:
                        assert not dropped, f"{experiment}: " + "\n".join(map(str, dropped))

    def _commutes(self, tree: Node[Any], ordered: Node[Any], other: str, label: str) -> None:
        """Check that features in the same stage commute if no order is declared, because they are then ordered by name."""
        features = resolve(tree, with_=[*self.needs(), self.text(), other]).features
        names = (self.name, other.partition(":")[0])
        pair = [f for name, f in features if name in names]
        stated = Order.from_features(dict(features), registry()).predecessors
        if len(pair) == 2 and pair[0].stage == pair[1].stage and not any(stated.values()):
            try:
                reversed_result: Any = pair[0].apply(pair[1].apply(tree))
            except AxlearnError as error:
                reversed_result = error
            assert isinstance(reversed_result, Node), (
                f"{label}: the reverse of the order by name is refused: {reversed_result}"
            )
            assert diff(ordered, reversed_result) == (), (
                f"{label}: both are in the same stage, and the config depends on their names"
            )

    def needs(self) -> tuple[str, ...]:
        """Return `NAME:EXAMPLE` for each feature that this feature needs."""
        return tuple(feature_text(name) for name in needed_features(self.name))

    def tree(self, experiment: str) -> Node[Any]:
        """Return the config of an experiment, with the needed features if they can be applied."""
        plain = registry().experiment(experiment)
        tree = resolve_features(plain, *self.needs()) if self.needs() else plain
        return plain if isinstance(tree, AxlearnError) else tree

    def find_feature(self, tree: Node[Any]) -> Feature | None:
        """Return the feature with its options, or None if the request is refused with a helpful error."""
        result = resolve_features(tree, *self.needs(), self.text(), full_result=True)
        if isinstance(result, AxlearnError):
            assert_helps(result)
            return None
        return next(f for name, f in result.features if name == self.name)


def select_experiments() -> tuple[str, ...]:
    """Return a few installed experiments that together have every component of all of them."""
    kinds = {
        entry.name: {type(part) for part in find(registry().experiment(entry.name), Node).values()}
        for entry in registry().entries("experiments")
    }
    remaining, selection = set().union(*kinds.values()), list[str]()
    while remaining:
        selection.append(max(kinds, key=lambda name: len(kinds[name] & remaining)))
        remaining -= kinds[selection[-1]]
    return tuple(selection)


def resolve_features(tree: Node[Any], *features: str, full_result: bool = False) -> Any:
    """Return the config (or the whole result) with some features, or the error if they are refused."""
    try:
        result = resolve(tree, with_=features)
    except AxlearnError as error:
        return error
    return result if full_result else result.config


def apply_feature(feature: Feature, tree: Node[Any], label: str) -> Node[Any] | None:
    """Apply a feature to a config. Return None if the feature refuses the config with a helpful error."""
    try:
        return feature.apply(tree)
    except ConfigError as error:
        assert_helps(error)
        return None


def assert_helps(error: AxlearnError) -> None:
    """Assert that an error tells the user what to do."""
    assert any(word in str(error) for word in ("fix:", "did you mean", "expected:")), f"the error has no fix: {error}"
