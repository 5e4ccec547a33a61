"""From a request to a config: the order of steps, conflicts, and who set what."""

import itertools
import re

import pytest

from axlearn_core.config import ABSENT, get
from axlearn_core.errors import ConfigError, PluginError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.resolve import resolve

pytestmark = pytest.mark.usefixtures("toy")

EXPERIMENT = "experiment toy (axlearn-plugins-toy 0.3)"


def chain(resolved, path):
    return [(step.source, step.old, step.new) for step in resolved.explain(path)[path]]


def test_order_of_steps(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "experiment: toy\nfeatures:\n  - toy-wide\nset:\n  model.hidden_dim: 192\n  max_steps: 5\n  learning_rate: 1\n"
    )
    resolved = resolve(file, set=["model.hidden_dim=320"], steps=9, target="cpu-8")
    assert get(resolved.config, "model.hidden_dim") == 320
    assert chain(resolved, "model.hidden_dim") == [
        (EXPERIMENT, ABSENT, 64),
        ("feature toy-wide (axlearn-plugins-toy 0.3)", 64, 128),
        (f"{file}:5", 128, 192),
        ("--set model.hidden_dim=320", 192, 320),
    ]
    assert chain(resolved, "max_steps")[1:] == [(f"{file}:6", 100, 5), ("--steps 9", 5, 9)]
    assert chain(resolved, "learning_rate")[1:] == [(f"{file}:7", 1e-3, 1.0)]
    assert resolved.title == "toy"
    assert resolved.machine is not None
    assert (resolved.machine.name, resolved.machine.devices) == ("cpu-8", 8)
    assert [name for name, _ in resolved.features] == ["toy-wide"]


def test_the_order_of_writing_does_not_matter():
    texts = ["toy-rope:theta=5", "toy-moe:num_experts=4", "toy-needy", "toy-rope"]
    trees = {
        (resolve("toy", with_=order).config, tuple(n for n, _ in resolve("toy", with_=order).features))
        for order in itertools.permutations(texts)
    }
    ((tree, names),) = trees
    assert names == ("toy-moe", "toy-rope", "toy-needy")  # by stage, then by name
    assert get(tree, "model.attention.position.theta") == 3.0


def test_removed_leaves_are_kept_in_the_provenance():
    resolved = resolve("toy", with_={"toy-moe": {"num_experts": 4}}, set=["model.feed_forward.hidden_dim=96"])
    assert chain(resolved, "model.feed_forward.hidden_dim.factor")[-1] == (
        "--set model.feed_forward.hidden_dim=96",
        4.0,
        ABSENT,
    )
    steps = chain(resolved, "model.feed_forward.type")
    assert steps[-1] == ("feature toy-moe (axlearn-plugins-toy 0.3)", "toy-feedforward", "toy-experts")
    assert set(resolved.explain("model.feed_forward")) >= {"model.feed_forward.type", "model.feed_forward.num_experts"}
    assert resolved.explain("") == resolved.provenance


def test_a_setting_to_what_was_there_is_recorded():
    assert chain(resolve("toy", set=["max_steps=100"]), "max_steps")[1:] == [("--set max_steps=100", 100, 100)]


def test_patterns_and_python_values():
    import toy_parts

    resolved = resolve("toy", set={"**.num_heads": 8, "model.attention.position": toy_parts.Rotary.Config(theta=7.0)})
    assert get(resolved.config, "model.attention.num_heads") == 8
    assert get(resolved.config, "model.attention.position.theta") == 7.0


def test_provenance_covers_exactly_the_tree_and_what_was_removed():
    from axlearn_core.config import flatten

    resolved = resolve("toy", with_=["toy-rope"], set=["tags=[a, b]"])
    flat = flatten(resolved.config, registry().display_name)
    last_values = {path: steps[-1].new for path, steps in resolved.provenance.items() if steps[-1].new is not ABSENT}
    assert last_values == flat


def test_options_are_merged_and_checked():
    resolved = resolve("toy", with_=["toy-moe:num_experts=2", "toy-moe:names=[a, b]"])
    ((_, feature),) = resolved.features
    assert (feature.num_experts, feature.names) == (2, ("a", "b"))
    with pytest.raises(RequestError, match=r"two values for 'theta': 1 \(int\) by --with toy-rope:theta=1, 2 \(int\)"):
        resolve("toy", with_=["toy-rope:theta=1", "toy-rope:theta=2"])


@pytest.mark.slow_cases("toy-moe:num_experts=2.0-expected4")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("toy-rope:thetta=1", ["toy-rope.thetta: unknown key of Rope", "did you mean: theta"]),
        ("toy-rope:theta=high", ["toy-rope.theta: wrong type", "'high' (str)", "float"]),
        ("toy-rope:theta=-1", ["toy-rope.theta: out of range", "more than 0"]),
        ("toy-moe", ["toy-moe.num_experts: Moe needs a value"]),
        ("toy-moe:num_experts=2.0", ["toy-moe.num_experts: wrong type", "expected: int"]),
        ("toy-roep", ["unknown feature 'toy-roep'", "toy-rope"]),
    ],
)
def test_features_asked_for_wrongly(text, expected):
    with pytest.raises(RequestError) as caught:
        resolve("toy", with_=[text])
    for part in (f"--with {text}", *expected):
        assert part in str(caught.value)


def test_two_features_of_one_stage_on_one_path(install):
    install(
        "axlearn-plugins-other",
        "5.0",
        modules={"other_part": OTHER},
        points={"features": {"other": "other_part:Other"}},
    )
    with pytest.raises(RequestError) as caught:
        resolve("toy", with_=["toy-wide", "other"])
    for part in (
        "stage 'tune'",
        "model.hidden_dim",
        "other (axlearn-plugins-other 5.0): 64 -> 96",
        "toy-wide (axlearn-",
    ):
        assert part in str(caught.value)


OTHER = """
from axlearn_core.config import node, patch
from axlearn_core.plugins.feature import Feature

@node
class Other(Feature):
    def apply(self, cfg):
        return patch(cfg, {"model.hidden_dim": 96})
"""


WRAPPERS = """
from axlearn_core.config import node, patch
from axlearn_core.plugins.feature import Feature

class Wrapper(Feature):
    stage = "wrap"
    mark = ""
    def apply(self, cfg):
        return cfg if self.mark in cfg.tags else patch(cfg, {"tags": (*cfg.tags, self.mark)})
    def in_effect(self, cfg):
        return self.mark in cfg.tags
"""


def install_wrappers(install, *orders):
    """Features of the stage `wrap` that add their name to `tags`; `orders` are (name, class variables)."""
    classes = "".join(
        f"\n@node\nclass {name.title()}(Wrapper):\n    mark = {name!r}\n    "
        + "\n    ".join(f"{k} = {v!r}" for k, v in more.items())
        + "\n"
        for name, more in orders
    )
    points = {"features": {name: f"wrappers:{name.title()}" for name, _ in orders}}
    install("axlearn-plugins-wrappers", "2.0", modules={"wrappers": WRAPPERS + classes}, points=points)


def test_features_of_one_stage_wrap_one_path_in_a_stated_order(install):
    install_wrappers(install, ("a", {"after": ("b", "absent")}), ("b", {}), ("c", {"before": ("b",)}))
    for order in itertools.permutations(("a", "b", "c")):
        resolved = resolve("toy", with_=order)
        assert resolved.config.tags == ("c", "b", "a")
        assert [name for name, _ in resolved.features] == ["c", "b", "a"]
    assert [step for _, _, step in chain(resolved, "tags")] == [(), ("c",), ("c", "b"), ("c", "b", "a")]


def test_an_order_through_a_feature_that_is_not_asked_for_orders_nothing(install):
    install_wrappers(install, ("a", {"after": ("b",)}), ("b", {}), ("c", {"before": ("b",)}))
    with pytest.raises(RequestError, match="two features in stage 'wrap' change tags"):
        resolve("toy", with_=["a", "c"])


def test_a_path_that_three_features_change_needs_an_order_of_all(install):
    install_wrappers(install, ("a", {}), ("b", {"after": ("a",)}), ("c", {"after": ("a",)}))
    with pytest.raises(
        RequestError, match=r"b \(axlearn-plugins-wrappers 2.0\)[^$]*c \(axlearn-plugins-wrappers 2.0\)"
    ):
        resolve("toy", with_=["a", "b", "c"])


def test_features_that_come_before_one_another(install):
    install_wrappers(
        install, ("a", {"before": ("b",)}), ("b", {"before": ("c",)}), ("c", {"before": ("a",)}), ("d", {})
    )
    with pytest.raises(PluginError) as caught:
        resolve("toy", with_=["d", "c", "b", "a"])
    message = str(caught.value)
    for first, second in ("ab", "bc", "ca"):
        assert f"{first} before {second}, required by {first} (axlearn-plugins-wrappers 2.0)" in message
    assert "d before" not in message
    assert "before d" not in message
    assert caught.value.exit_code == 2
    assert resolve("toy", with_=["a", "b"]).config.tags == ("a", "b")


def test_an_order_against_the_stages(install):
    install_wrappers(install, ("a", {"stage": "tune"}), ("b", {"after": ("a",)}))
    with pytest.raises(PluginError, match="puts 'a' before 'b', which contradicts the order of their stages"):
        resolve("toy", with_=["a", "b"])
    install_wrappers_of_a_rule = 'MeshRule(target="chip-*", features=("b", "a"))'
    install_chip(install, install_wrappers_of_a_rule)
    with pytest.raises(PluginError, match="contradicts the order of their stages"):
        resolve("toy", target="chip-1x1")


def test_features_of_a_mesh_rule_keep_their_stated_order(install):
    install_wrappers(install, ("a", {"after": ("b",)}), ("b", {}))
    install_chip(install, 'MeshRule(target="chip-*", features=("a", "b"))')
    assert resolve("toy", target="chip-1x1").config.tags == ("b", "a")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"before": "b"}, r"A.before is 'b'; it must be a tuple of feature names"),
        ({"after": (1,)}, r"A.after is \(1,\); it must be a tuple"),
        ({"before": ("b",), "after": ("b",)}, "A is both before and after 'b'"),
        ({"before": ("a",)}, r"a before a, required by a"),
    ],
)
def test_orders_that_are_wrong_in_themselves(install, more, message):
    install_wrappers(install, ("a", more))
    with pytest.raises(PluginError, match=message):
        resolve("toy", with_=["a"])


def test_the_doctor_names_a_feature_that_a_stated_order_misspells(install):
    from axlearn_plugins_tools.doctor.examine import examine

    install_wrappers(install, ("a", {"after": ("toy-roep", "elsewhere-entirely")}))
    warnings = [f.message for f in examine(registry()) if f.status == "warning" and f.name == "a"]
    assert warnings == ["`before` or `after` names 'toy-roep', which is not installed; did you mean: toy-rope?"]


def test_needs_and_excludes():
    with pytest.raises(RequestError, match=r"'toy-needy' \(--with toy-needy\) requires 'toy-rope'"):
        resolve("toy", with_=["toy-needy"])
    with pytest.raises(RequestError, match=r"'toy-moe' .* and 'toy-wide' .* cannot be combined"):
        resolve("toy", with_=["toy-wide", "toy-moe:num_experts=2"])


def test_a_feature_that_changes_nothing():
    with pytest.raises(RequestError, match=r"'toy-idle' \(axlearn-plugins-toy 0.3\) changes nothing"):
        resolve("toy", with_=["toy-idle"])
    once = resolve("toy", with_=["toy-rope:theta=5"]).config
    assert resolve(once, with_=["toy-rope:theta=5"]).config == once  # in effect, and says so
    assert get(resolve(once, with_=["toy-rope:theta=6"]).config, "model.attention.position.theta") == 6.0


def test_a_feature_of_the_stage_execute_changes_no_mathematics(install):
    source = OTHER.replace("    def apply", '    stage = "execute"\n\n    def apply')
    install("axlearn-plugins-other", modules={"other_part": source}, points={"features": {"other": "other_part:Other"}})
    with pytest.raises(
        PluginError, match=r"'other' .* stage 'execute' but changes model.hidden_dim, which is mathematics"
    ) as e:
        resolve("toy", with_=["other"])
    assert "fix: change its stage, or mark the field" in str(e.value)
    assert e.value.exit_code == 2


def test_features_that_fail():
    with pytest.raises(
        RequestError, match=r"'toy-misfit' \(axlearn-plugins-toy 0.3\) does not fit this config:\n.*nope|deco"
    ):
        resolve("toy", with_=["toy-misfit"])
    with pytest.raises(PluginError, match=r"'toy-broken'[\s\S]*KeyError: 'oops'[\s\S]*toy_features.py:"):
        resolve("toy", with_=["toy-broken"])


MISFIT = """
from axlearn_core.config import node
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature

@node
class Late(Feature):
    stage = "wrap"

    def apply(self, cfg):
        raise ConfigError(Problem(path="model.feed_forward", message="late needs a toy-feedforward"))
"""


def test_a_misfit_names_the_feature_that_set_the_value(install):
    install("axlearn-plugins-late", modules={"late_part": MISFIT}, points={"features": {"late": "late_part:Late"}})
    with pytest.raises(RequestError) as alone:
        resolve("toy", with_=["late"])
    assert "\nmodel.feed_forward: late needs a toy-feedforward" in str(alone.value)
    with pytest.raises(RequestError) as both:
        resolve("toy", with_=["late", "toy-moe:num_experts=2"])
    setter = r"set by feature toy-moe \(axlearn-plugins-toy 0.3\)"
    assert re.search(rf"'late' .* does not fit this config:\n{setter}: model.feed_forward: late needs", str(both.value))


CHIP = """
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_targets():
    return [Target(name="chip", size="hosts", platform="gpu", examples=("chip-8x4",))]

@hookimpl
def axlearn_mesh_rules():
    return [{}]
"""


def install_chip(install, *rules):
    module = CHIP.replace("[{}]", f"[{', '.join(rules)}]")
    install("axlearn-plugins-chip", modules={"chip_part": module}, points={"plugins": {"chip": "chip_part"}})


WIDE = 'MeshRule(target="chip-*", features=("toy-wide", "toy-rope:theta=2"))'


def test_features_of_the_mesh_rule(install):
    install_chip(install, WIDE)
    resolved = resolve("toy", target="chip-8x4")
    assert [n for n, _ in resolved.features] == ["toy-rope", "toy-wide"]
    assert resolved.rule == "mesh rule 'chip-*' (chip of axlearn-plugins-chip 1.0)"
    own_theta = resolve("toy", with_=["toy-rope:theta=3"], target="chip-8x4")
    assert get(own_theta.config, "model.attention.position.theta") == 3.0  # what the user says wins
    own_theta = resolve("toy", with_=["toy-rope"], target="chip-8x4")  # all of it, options that are left out too
    assert get(own_theta.config, "model.attention.position.theta") != 2.0
    assert [n for n, _ in resolve("toy", without=["toy-wide"], target="chip-8x4").features] == ["toy-rope"]


def test_the_mesh_rule_comes_after_the_users_features(install):
    install_chip(install, 'MeshRule(target="chip-*", features=("other",))')
    install("axlearn-plugins-other", modules={"other_part": OTHER}, points={"features": {"other": "other_part:Other"}})
    resolved = resolve("toy", with_=["toy-wide"], target="chip-8x4")
    assert [s[2] for s in chain(resolved, "model.hidden_dim")] == [64, 128, 96]


def test_a_mesh_rule_feature_that_does_not_fit_is_skipped_with_a_note(install):
    install_chip(install, 'MeshRule(target="chip-*", features=("toy-misfit", "toy-wide"))')
    resolved = resolve("toy", target="chip-1x1")
    assert [n for n, _ in resolved.features] == ["toy-wide"]
    (misfit,) = resolved.notes
    assert (
        "the feature 'toy-misfit' was skipped: the feature 'toy-misfit' (axlearn-plugins-toy 0.3) does not fit"
        in misfit
    )
    assert [(d.kind, d.subject) for d in resolved.decisions] == [
        ("machine", "chip-1x1"),
        ("mesh rule", "'chip-*' (chip of axlearn-plugins-chip 1.0)"),
        ("left out", "toy-misfit"),
        ("applied", "toy-wide"),
    ]


def test_the_most_specific_rule_holds(install):
    rules = ['MeshRule(target="chip-*")', 'MeshRule(target="chip-8x*")', 'MeshRule(target="*")']
    install_chip(install, *rules)
    assert "'chip-8x*'" in str(resolve("toy", target="chip-8x4").rule)
    assert "'chip-*'" in str(resolve("toy", target="chip-4x4").rule)
    assert "'cpu*'" in str(resolve("toy", target="cpu").rule)


def test_a_request_overrides_or_removes_features_of_a_model_size_rule(install):
    rule = 'MeshRule(target="chip-*", parameters=(0, 1e12), features=("toy-rope:theta=2",))'
    install_chip(install, rule)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("axlearn_core.plugins.resolve.load", lambda path: lambda config: 5)
        assert not resolve("toy", without=["toy-rope"], target="chip-1x1").features
        resolved = resolve("toy", set={"model.attention.position.theta": 7.0}, target="chip-1x1")
        assert get(resolved.config, "model.attention.position.theta") == 7.0
        with pytest.raises(ConfigError, match="max_step: no 'max_step'"):
            resolve("toy", set={"max_step": 7}, target="chip-1x1")


def test_two_rules_that_are_equally_specific_are_both_named(install):
    install_chip(install, WIDE, WIDE)
    with pytest.raises(PluginError, match=r"two mesh rules are equally specific for chip-8x4: 'chip-\*' of chip of"):
        resolve("toy", target="chip-8x4")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("chip-8", r"'chip-8' is not a size of the target 'chip'\n    expected: chip-CHIPSxHOSTS, such as chip-8x4"),
        ("chip-0x4", "is not a size of"),
        ("cpu-", "is not a size of"),
        (
            "chip-8x999999999999",
            "'chip-8x999999999999' is larger than any machine\n    expected: at most 1,048,576 devices",
        ),
        ("cpu-2x2", "'cpu-2x2' is not a size of the target 'cpu'\n    expected: cpu-DEVICES"),
        ("chop-8x4", r"unknown target 'chop-8x4'\n    did you mean: chip-8x4"),
    ],
)
def test_targets_that_there_are_not(install, target, message):
    install_chip(install)
    with pytest.raises(RequestError, match=message):
        resolve("toy", target=target)
