"""Removing the features and settings that do not matter for a failure."""

import time

from axlearn_core.config import get
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_verify.prove.minimize import command, minimize

LATER = 60.0


class Failure:
    """A failed check."""

    name = "causality"


def search(request, fails, seconds=LATER):
    resolved = resolve(request)
    deadline = time.monotonic() + seconds
    return minimize(request, resolved, lambda config: Failure() if fails(config) else None, deadline=deadline)


def kind(config, path):
    return type(get(config, path)).owner.__name__


def has_experts(config):
    return kind(config, "model.decoder.layer.feed_forward") == "MixtureOfExperts"


def test_only_the_feature_that_matters_is_left():
    request = Request.from_arguments("quickstart", with_=["rope:theta=1000", "moe", "ema"], set=["seed=3"])
    minimal = search(request, has_experts)
    assert minimal.words == ("quickstart", "--with", "moe")
    assert sorted(minimal.removed) == ["--set seed=3", "--with ema", "--with rope:theta=1000"]
    assert minimal.complete
    assert command(minimal) == "axlearn prove quickstart --with moe --only causality"


def test_two_features_that_fail_together_are_both_left():
    request = Request.from_arguments("quickstart", with_=["moe", "ema", "precision:dtype=bfloat16"])
    minimal = search(request, lambda config: has_experts(config) and config.learner.ema_decay is not None)
    assert minimal.words == ("quickstart", "--with", "moe", "--with", "ema")


def test_features_of_a_file_are_removed_by_name(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: quickstart\nfeatures: [moe, ema]\n")
    minimal = search(Request.from_arguments(str(file)), has_experts)
    assert minimal.words == (str(file), "--without", "ema")


def test_a_failure_that_does_not_repeat_has_no_smallest_request():
    assert search(Request.from_arguments("quickstart", with_=["moe"]), lambda config: False) is None


def test_the_time_limit_ends_the_search():
    minimal = search(Request.from_arguments("quickstart", with_=["moe", "ema"]), lambda config: True, seconds=-1)
    assert minimal.words == ("quickstart", "--with", "moe", "--with", "ema")
    assert not minimal.complete
