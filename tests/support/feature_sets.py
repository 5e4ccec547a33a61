"""Sets of features that together contain every pair of features that is legal on the quickstart."""

import itertools

from axlearn_core.errors import PluginError, RequestError
from axlearn_core.plugins.resolve import resolve
from support import toy_models
from support.paths import TESTS

FILE = TESTS / "e2e/feature_sets.txt"
SIZE = 8
"""Largest number of features in a set. Larger sets are fewer, but their proofs take longer."""


def read():
    """The sets: one on each line of the file."""
    return [line.split() for line in FILE.read_text("utf-8").splitlines()]


def options(features):
    """The texts of `--with` for features, and for those that they need."""
    return list(dict.fromkeys(text for name in features for text in toy_models.use(name)))


def pairs(features):
    """The pairs of features, each in the alphabetical order."""
    return set(itertools.combinations(sorted(features), 2))


def is_legal(features):
    """Whether the features go together on the quickstart."""
    try:
        resolve("quickstart", with_=options(features))
    except PluginError:
        raise  # a feature that fails, and does not refuse
    except RequestError:
        return False
    return True


def legal_pairs():
    """The pairs of installed features that go together on the quickstart."""
    alone = [name for name in toy_models.features() if is_legal([name])]
    return {pair for pair in pairs(alone) if is_legal(pair)}


def make_sets():
    """Cover the legal pairs greedily: to a missing pair, add the features that contain the most missing pairs with it."""
    legal = legal_pairs()
    names = sorted({name for pair in legal for name in pair})
    missing, sets = set(legal), []
    while missing:
        features = list(min(missing))
        others = [n for n in names if n not in features]
        while others and len(features) < SIZE:
            others.sort(key=lambda n: (-len(missing & pairs([n, *features]) - pairs(features)), n))
            name = others.pop(0)
            if pairs([name, *features]) <= legal and is_legal([*features, name]):
                features.append(name)
        missing -= pairs(features)
        sets.append(sorted(features))
    return sets


if __name__ == "__main__":
    FILE.write_text("".join(" ".join(features) + "\n" for features in make_sets()), "utf-8")
