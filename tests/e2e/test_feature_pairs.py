"""Every pair of installed features on every installed experiment: one tree, regardless of the order, or one and the same refusal.

The features come from their entry points. One with options that have to be given says by its `example` how.
"""

import itertools

import attrs
import pytest

from axlearn_core.config import REQUIRED
from axlearn_core.errors import ConfigError, PluginError, RequestError
from axlearn_core.plugins.order import Order
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve
from axlearn_testing.dropped import find_dropped_or_refusal, needed_features
from support import toy_models

NAMES = registry()
EXPERIMENTS = [entry.name for entry in NAMES.entries("experiments")]
FEATURES = [entry.name for entry in NAMES.entries("features")]
PAIRS = list(itertools.combinations(FEATURES, 2))
RELATIVES = {"llama2-7b", "llama2-70b", "llama3-8b", "vit-b16", *toy_models.PUBLISHED}
"""Made of the same parts as another experiment: among the slow tests."""
ALL = [pytest.param(n, marks=pytest.mark.slow if n in RELATIVES else ()) for n in EXPERIMENTS]
DECODERS = [n for n in EXPERIMENTS if n not in toy_models.PUBLISHED and hasattr(NAMES.experiment(n).model, "decoder")]
"""All features go with these. On others a feature may refuse, and says what to do: with a model that reads no text, or where the
family has what the feature would lose (`replace` on the norms of Gemma)."""


def use(name):
    """The text of `--with` for a feature by itself."""
    example = NAMES.feature(name).example
    return f"{name}:{example}" if example else name


def both(first, second):
    """The two, and what they need."""
    return list(dict.fromkeys((first, second, *needed_features(first), *needed_features(second))))


def outcome(experiment, *names):
    """(tree, features in the order of their application, provenance) or the text of the refusal."""
    try:
        result = resolve(experiment, with_=[use(n) for n in names])
    except PluginError:
        raise  # a feature that fails, and does not refuse
    except RequestError as error:
        return str(error)
    return result.config, result.features, dict(result.provenance)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_that_needs_options_has_an_example(name):
    cls = NAMES.feature(name)
    needed = [a.name for a in attrs.fields(cls) if a.default is REQUIRED]
    assert all(f"{option}=" in cls.example for option in needed), f"{name} needs {needed}; give it an `example`"


@pytest.mark.slow_cases("quickstart")
@pytest.mark.parametrize("experiment", ALL)
def test_each_feature_takes_effect_and_is_idempotent(experiment):
    for name in FEATURES:
        result = outcome(experiment, name)
        needs = needed_features(name)
        if needs:
            assert isinstance(result, str)
            result = outcome(experiment, name, *needs)
        if isinstance(result, str) and experiment not in DECODERS:
            assert any(f"'{n}'" in result for n in (name, *needs))
            assert "fix:" in result
            continue
        assert not isinstance(result, str), f"{name} on {experiment}: {result}"
        again = result[0]
        for _, feature in result[1]:
            again = feature.apply(again)
        assert again == result[0], f"{name} on {experiment}: twice is not once"


@pytest.mark.parametrize(
    ("experiment", "pairs"),
    [
        pytest.param("quickstart", PAIRS[::20], id="quickstart-twentieth"),
        *(pytest.param(n, PAIRS, id=n, marks=pytest.mark.slow) for n in EXPERIMENTS),
    ],
)
def test_the_order_of_a_pair_does_not_matter(experiment, pairs):
    for first, second in pairs:
        one, other = outcome(experiment, *both(first, second)), outcome(experiment, *both(second, first))
        if isinstance(one, str):
            assert isinstance(other, str), f"{second}, {first} is let through, and {first}, {second} is refused: {one}"
            alone = {n for n in (first, second) if isinstance(outcome(experiment, *both(n, n)), str)}
            expected = {first, second} if not alone else {n for n in alone if f"'{n}'" in one} or alone
            words = set(one.replace("'", " ").replace(":", " ").split())
            assert all({n, *needed_features(n)} & words for n in expected), f"it names both: {one}"
            assert _without_places(one) == _without_places(other)
        else:
            assert one == other, f"{first}, {second} on {experiment}"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(toy_models.PUBLISHED))
def test_no_feature_drops_another(experiment):
    """`tests/conformance` tries the other experiments."""
    tree, refused = NAMES.experiment(experiment), 0
    for first, second in itertools.permutations(FEATURES, 2):
        dropped = find_dropped_or_refusal(tree, use(first), use(second))
        if isinstance(dropped, RequestError):
            refused += 1
            assert any(f"'{name}'" in str(dropped) for name in both(first, second)), dropped
        else:
            assert not dropped, "\n".join(map(str, dropped))
    assert refused < len(PAIRS)


def _without_places(text):
    return sorted(text.split())


@pytest.mark.parametrize(
    ("experiment", "pairs"),
    [
        pytest.param("quickstart", PAIRS[::20], id="quickstart-twentieth"),
        *(pytest.param(n, PAIRS, id=n, marks=pytest.mark.slow) for n in EXPERIMENTS),
    ],
)
def test_a_pair_of_one_stage_gives_the_same_tree_applied_in_either_order(experiment, pairs):
    """Without a stated order, names decide it within a stage, and must not decide what comes of it."""
    for first, second in pairs:
        result = outcome(experiment, *both(first, second))
        if isinstance(result, str) or len({feature.stage for _, feature in result[1]}) > 1:
            continue
        if any(Order.from_features(dict(result[1]), NAMES).predecessors.values()):
            continue
        swapped = resolve(experiment).config
        try:
            for _, feature in reversed(result[1]):
                swapped = feature.apply(swapped)
        except ConfigError as error:
            pytest.fail(f"{second} before {first} on {experiment}: {error}")
        assert swapped == result[0], f"{first}, {second} on {experiment}"
