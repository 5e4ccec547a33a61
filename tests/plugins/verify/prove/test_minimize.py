"""Removing the features and settings that do not matter for a failure."""

import time

import pytest

from axlearn_core.config import get
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_verify.prove.minimize import command, minimize

LATER = 60.0


class Failure:
    """A failed check."""

    name, seed = "causality", 0


def search(request, fails, seconds=LATER, meshes=()):
    resolved = resolve(request)
    deadline = time.monotonic() + seconds

    def still_fails(resolved, shapes, located):
        return (
            Failure() if fails(resolved.config) and (not shapes or any("tensor" in shape for shape in shapes)) else None
        )

    return minimize(request, resolved, still_fails, deadline=deadline, meshes=meshes)


def words(*features):
    """Return the words of `quickstart` with features, and with nothing that a failure does not need."""
    smallest = ("--set", "evaluators={}", "--set", "model.decoder.num_layers=1")
    return ("quickstart", *(word for name in features for word in ("--with", name)), *smallest)


def kind(config, path):
    return type(get(config, path)).owner.__name__


def has_experts(config):
    return kind(config, "model.decoder.layer.feed_forward") == "MixtureOfExperts"


def test_only_the_feature_that_matters_is_left():
    request = Request.from_arguments("quickstart", with_=["rope:theta=1000", "moe", "ema"], set=["seed=3"])
    minimal = search(request, has_experts)
    losses = [f"model.decoder.layer.feed_forward.router.{name}" for name in ("load_balance", "z_loss")]
    settings = ["evaluators={}", *(f"{path}=0.0" for path in losses), "model.decoder.num_layers=1"]
    assert minimal.words == ("quickstart", "--with", "moe", *(w for s in settings for w in ("--set", s)))
    assert minimal.features == ("moe",)
    assert set(minimal.removed) == {
        *("--set seed=3", "--with ema", "--with rope:theta=1000"),
        *("evaluators eval, sample", "layers of model.decoder.num_layers after 1"),
        *(f"{losses[0]}=0.01", f"{losses[1]}=0.001"),
    }
    assert minimal.complete
    assert command(minimal).startswith("axlearn prove quickstart --with moe --set 'evaluators={}' --set ")
    assert command(minimal).endswith(" --only causality")


def test_two_features_that_fail_together_are_both_left():
    request = Request.from_arguments("quickstart", with_=["moe", "ema", "precision:dtype=bfloat16"])
    minimal = search(request, lambda config: has_experts(config) and config.learner.ema_decay is not None)
    assert minimal.features == ("moe", "ema")


def test_features_of_a_file_are_removed_by_name(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: quickstart\nfeatures: [moe, ema]\n")
    minimal = search(Request.from_arguments(str(file)), has_experts)
    assert minimal.words[:3] == (str(file), "--without", "ema")
    assert minimal.features == ("moe",)


def test_a_failure_that_does_not_repeat_has_no_smallest_request():
    assert search(Request.from_arguments("quickstart", with_=["moe"]), lambda config: False) is None


@pytest.mark.parametrize("needed", [1, 2, 3])
def test_the_smallest_number_of_layers_is_left(needed):
    minimal = search(Request.from_arguments("quickstart"), lambda config: config.model.decoder.num_layers >= needed)
    assert minimal.words[-1] == f"model.decoder.num_layers={needed}"


def test_a_kind_of_layers_that_does_not_matter_is_removed():
    def has_window(config):
        window = get(config, "model.decoder.layer.attention.window")
        return any(getattr(kind, "size", None) for kind in (window, *getattr(window, "children", ())))

    minimal = search(Request.from_arguments("gemma3-4b"), has_window)
    assert "model.decoder.layer.attention.window={type: window, size: 1024}" in minimal.words
    assert "1 of 2 kinds of model.decoder.layer.attention.window" in minimal.removed
    again = resolve(Request.from_arguments("gemma3-4b", set=[w for w in minimal.words[1:] if w != "--set"])).config
    assert get(again, "model.decoder.layer.attention.window").size == 1024


def test_mesh_axes_that_do_not_matter_are_removed():
    meshes = ({"data": 2, "fsdp": 2}, {"expert": 2, "tensor": 2})
    request = Request.from_arguments("quickstart", set=["mesh.shape={data: 2, fsdp: 4}"])
    minimal = search(request, lambda config: config.mesh.shape.get("fsdp") == 4, meshes=meshes)
    assert minimal.meshes == ({"tensor": 2},)
    assert "mesh.shape={fsdp: 4}" in minimal.words
    assert command(minimal).endswith("--only causality --mesh tensor=2")


def test_the_time_limit_ends_the_search():
    minimal = search(Request.from_arguments("quickstart", with_=["moe", "ema"]), lambda config: True, seconds=-1)
    assert minimal.words == ("quickstart", "--with", "moe", "--with", "ema")
    assert not minimal.complete
