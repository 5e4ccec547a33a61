"""Mesh rules apply completely to a named target, and only their execution settings to a detected machine."""

import pytest

from axlearn_core.config import flatten
from axlearn_core.config.kinds import mathematics
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import DetectedMachine
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins import resolve as resolution
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.resolve import resolve
from axlearn_core.plugins.targets import find_machine


def on(name, description="8 x Toy"):
    return lambda config: DetectedMachine(description=description, machine=find_machine(name))


def detected(experiment="quickstart", machine="h100-8x1", **options):
    return resolve(experiment, detect=on(machine), **options)


def decided(resolved, kind):
    return [(d.subject, d.reason) for d in resolved.decisions if d.kind == kind]


@pytest.fixture
def rule(monkeypatch):
    """`rule(features, packages, **)` is the mesh rule of every machine."""

    def make(*features, packages=None, **more):
        actual = ("mesh rule 'toy*' (toy of axlearn-plugins-toy 1.0)", MeshRule(
            target="toy*", features=features, packages=packages or {}, **more
        ))  # fmt: skip
        monkeypatch.setattr(resolution, "find_rule", lambda *_: actual)

    return make


def test_a_detected_machine_brings_the_execution_of_its_rule():
    resolved = detected(machine="h100-8x1")
    assert resolved.detected
    assert resolved.machine.name == "h100-8x1"
    assert dict(resolved.config.mesh.shape) == {"fsdp": -1}
    remat = "model.decoder.stack.remat.type"
    assert flatten(resolved.config)[remat].endswith("RematPolicyTags")
    assert [s.source.split(" (")[0] for s in resolved.explain(remat)[remat]] == ["feature remat"]
    assert decided(resolved, "machine") == [("h100-8x1, 8 x Toy", "")]
    assert [s for s, _ in decided(resolved, "applied")] == ["remat:policy=gpu-attention", "mesh"]
    assert decided(resolved, "left out") == []
    assert mathematics(resolved.config) == mathematics(resolve("quickstart").config)


def test_mesh_rules_leave_out_math_changes_and_tell_how_to_ask_for_them():
    resolved = detected(machine="tpu-v5e-8")
    assert mathematics(resolved.config) == mathematics(resolve("quickstart").config)
    assert resolved.config.model.decoder.stack.mode == "scan"
    left_out = dict(decided(resolved, "left out"))
    assert set(left_out) == {"precision:dtype=bfloat16", "quantization:format=int8"}
    assert left_out["precision:dtype=bfloat16"] == (
        "changes more than execution: model.dtype: 'float32' -> 'bfloat16'; "
        "--with precision:dtype=bfloat16 or --target tpu-v5e-8 applies it"
    )
    with_rule = resolve("quickstart", target="tpu-v5e-8")
    assert with_rule.config.model.dtype == "bfloat16"
    assert not with_rule.detected
    assert decided(with_rule, "left out") == []
    assert len(decided(with_rule, "applied")) == 5


def test_what_the_user_asks_for_of_it_is_there():
    resolved = detected(machine="tpu-v5e-8", with_=["precision:dtype=bfloat16", "scan:on=false"], without=["remat"])
    assert resolved.config.model.dtype == "bfloat16"
    assert resolved.config.model.decoder.stack.mode == "unrolled"
    assert resolved.config.model.decoder.stack.remat is None
    left_out = dict(decided(resolved, "left out"))
    assert left_out["remat:policy=full"] == "--without remat"
    assert left_out["scan"] == "you request it yourself"


def test_settings_come_last():
    resolved = detected(set={"mesh.shape": {"tensor": 2, "fsdp": -1}})
    assert dict(resolved.config.mesh.shape) == {"tensor": 2, "fsdp": -1}


def test_microbatches_are_not_for_a_machine_to_decide(rule):
    rule("gradient-accumulation:steps=4", "remat")
    resolved = detected()
    assert resolved.config.learner.accumulate_steps == 1
    ((subject, reason),) = decided(resolved, "left out")
    assert subject == "gradient-accumulation:steps=4"
    assert "learner.accumulate_steps: 1 -> 4" in reason
    assert resolve("quickstart", target="h100-8x1").config.learner.accumulate_steps == 4


def test_the_configs_own_rule_holds_whole_or_not_at_all():
    """Half of a layout may not fit in memory: remat without its microbatches."""
    own = {"shape": {"data": 4, "fsdp": 2}, "features": ["gradient-accumulation:steps=2", "remat:save=[query]"]}
    setting = {"mesh.targets": {"h100-8x1": own}}
    named = resolve("quickstart", set=setting, target="h100-8x1").config
    assert named.learner.accumulate_steps == 2
    assert dict(named.mesh.shape) == {"data": 4, "fsdp": 2}

    resolved = detected(set=setting)
    assert [str(d) for d in resolved.decisions][1:3] == [
        "    left out: mesh.targets.h100-8x1 (changes more than execution: learner.accumulate_steps: 1 -> 2; "
        "--target h100-8x1 applies it)",
        "mesh rule: 'h100-*' (gpu of axlearn-plugins-gpu 0.1.0)",
    ]
    plain = detected()
    assert resolved.config.learner == plain.config.learner
    assert resolved.config.model == plain.config.model
    assert resolved.config.mesh.shape == plain.config.mesh.shape

    asked = detected(set=setting, with_=["gradient-accumulation:steps=2"])
    assert asked.config == named
    assert decided(asked, "mesh rule") == [("mesh.targets.h100-8x1", "")]

    execution = {"mesh.targets": {"h100-8x1": {**own, "features": own["features"][1:]}}}
    assert dict(detected(set=execution).config.mesh.shape) == {"data": 4, "fsdp": 2}


def test_a_rule_of_the_config_that_a_cpu_does_not_bring_is_named():
    own = {"mesh.targets": {"cpu-*": {"features": ["gradient-accumulation:steps=2"]}}}
    resolved = detected(machine="cpu-8", set=own)
    assert resolved.config.learner.accumulate_steps == 1
    assert decided(resolved, "mesh rule") == [("none", "--target cpu-8 applies mesh.targets.cpu-*")]


def test_the_mesh_of_an_experiment_stays_on_a_detected_machine():
    own = resolve("quickstart", set={"mesh.shape": {"data": -1}}).config
    resolved = detected(own)
    assert dict(resolved.config.mesh.shape) == {"data": -1}
    assert ("mesh.shape, mesh.rules", "the config has the mesh {'data': -1}") in decided(resolved, "left out")
    assert dict(resolve(own, target="h100-8x1").config.mesh.shape) == {"fsdp": -1}


def test_a_whole_config_stays_as_it_is(tmp_path):
    (tmp_path / "whole.yaml").write_text(resolve("quickstart").to_yaml())
    resolved = detected(tmp_path / "whole.yaml")
    assert resolved.config == resolve("quickstart").config
    assert resolved.machine is None
    ((subject, reason),) = decided(resolved, "mesh rule")
    assert subject == "none"
    assert reason.startswith("the request is a complete config; --target h100-8x1 applies 'h100-*'")


@pytest.mark.parametrize("machine", ["cpu", "cpu-8"])
def test_a_cpu_changes_nothing(machine):
    data = ["input.source={type: standard-library}", "input.tokenizer={type: byte-tokenizer}"]
    resolved = resolve("llama2-7b", detect=on(machine), set=data)
    assert resolved.machine is None
    assert resolved.config == resolve("llama2-7b", set=data).config
    assert [str(d) for d in resolved.decisions] == [
        f"machine: {machine}, 8 x Toy",
        f"mesh rule: none (--target {machine} applies 'cpu*' (core of axlearn-core 0.1.0))",
    ]


def test_an_unknown_device_gets_no_rule_and_a_line():
    resolved = resolve("quickstart", detect=lambda config: DetectedMachine(description="4 x Abacus", machine=None))
    assert resolved.config == resolve("quickstart").config
    assert [str(d) for d in resolved.decisions] == [
        "machine: 4 x Abacus (no installed package supports it: no mesh rule)"
    ]


def test_no_target_is_no_rule():
    resolved = resolve("quickstart", target="none", detect=lambda config: pytest.fail("detected"))
    assert resolved.config == resolve("quickstart").config
    assert [str(d) for d in resolved.decisions] == ["mesh rule: none (--target none)"]
    assert not resolved.detected


def test_a_run_file_may_name_the_target(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: quickstart\ntarget: none\n")
    assert resolve(file, detect=lambda config: pytest.fail("detected")).machine is None
    file.write_text("experiment: quickstart\ntarget: tpu-v5e-8\n")
    resolved = resolve(file, detect=lambda config: pytest.fail("detected"))
    assert resolved.config.model.dtype == "bfloat16"
    assert not resolved.detected


def test_no_machine_is_looked_for_before_the_config_is_whole():
    for settings in ((), ("model.vocab_size=-1",), ("model.vocabulary=1",)):
        with pytest.raises(ConfigError):
            resolve("llama2-7b", set=settings, detect=lambda config: pytest.fail("detected"))


@pytest.mark.parametrize("options", [{"target": "h100-8x1"}, {"detect": on("h100-8x1")}])
def test_a_feature_of_the_rule_that_is_not_installed_is_an_error(rule, options):
    rule("remat", "warp", "weft:by=2", packages={"warp": "axlearn-plugins-loom", "weft": "axlearn-plugins-loom"})
    with pytest.raises(RequestError) as error:
        resolve("quickstart", **options)
    assert error.value.exit_code == 2
    assert str(error.value) == (
        "mesh rule 'toy*' (toy of axlearn-plugins-toy 1.0) applies 'warp', 'weft', which are not installed\n"
        "    fix: pip install axlearn-plugins-loom, skip it with --without warp --without weft, "
        "or disable mesh rules with --target none"
    )
    resolved = resolve("quickstart", without=["warp", "weft"], **options)
    assert [s for s, _ in decided(resolved, "applied")] == ["remat"]


def test_a_feature_whose_package_the_rule_does_not_name(rule):
    rule("warp")
    with pytest.raises(RequestError, match="fix: install the package that provides it, skip it with --without warp"):
        resolve("quickstart", target="h100-8x1")


def test_a_feature_of_the_rule_that_is_blocked_is_named_as_such(rule):
    rule("remat", packages={"remat": "axlearn-plugins-tools"})
    with pytest.raises(RequestError, match=r"the feature 'remat' of axlearn-plugins-tools .* is blocked by AXLEARN"):
        resolve("quickstart", target="h100-8x1", names=Registry("-remat"))


def test_every_shipped_rule_names_the_packages_of_its_features():
    from axlearn_core.plugins.manager import host
    from axlearn_core.plugins.registry import registry
    from axlearn_core.plugins.request import parse_feature

    for origin, rules in host().call("axlearn_mesh_rules"):
        for mesh_rule in rules:
            for name in (parse_feature(f).name for f in mesh_rule.features):
                package = registry().entry("features", name).distribution
                assert mesh_rule.packages[name] == package, (origin, mesh_rule.target, name)


def test_a_feature_that_changes_nothing_is_named(rule):
    """The one that is asked for; of a mesh rule's, the rule says so."""
    plain = resolve("quickstart", with_=["remat:policy=full"])
    assert decided(plain, "unchanged") == []
    again = resolve(plain.config, with_=["remat:policy=full"])
    assert again.config == plain.config
    assert [str(d) for d in again.decisions] == ["unchanged: the feature 'remat' (the config already has it)"]
    rule("remat:policy=full")
    assert decided(resolve(plain.config, target="h100-8x1"), "unchanged") == []


def on_cpus(count, **settings):
    machine = find_machine(f"cpu-{count}")
    detect = lambda config: DetectedMachine(description=f"{count} x cpu", machine=machine)  # noqa: E731
    return resolve("quickstart", detect=detect, set={"model.decoder.num_layers": 1, "input.batch_size": 12, **settings})


def test_weights_that_cpus_cannot_split_are_replicated():
    resolved = on_cpus(3)
    assert dict(resolved.config.mesh.shape) == {"data": -1}
    ((subject, reason),) = decided(resolved, "applied")
    assert subject == "mesh"
    assert reason.startswith("data=-1: weights are replicated because the default mesh cannot shard them: model (")
    assert reason.endswith("dimension 1 (embed) is not divisible by the mesh axes fsdp (128 over 3 devices)")
    assert [s.source.split(" (")[0] for s in resolved.provenance["mesh.shape.data"]] == ["mesh rule 'cpu*'"]
    assert mathematics(resolved.config) == mathematics(on_cpus(4).config)


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (4, {}),  # the default mesh fits
        (1, {}),
        (3, {"mesh.shape": {"fsdp": -1}}),  # as asked for, even if that is refused
        (5, {}),  # 12 rows cannot be split over 5 devices by any mesh
    ],
)
def test_any_other_mesh_of_cpus_stays(count, settings):
    resolved = on_cpus(count, **settings)
    assert dict(resolved.config.mesh.shape) == settings.get("mesh.shape", {})
    assert decided(resolved, "applied") == []


def test_a_named_target_of_cpus_brings_it_too():
    resolved = resolve("quickstart", target="cpu-3", set={"input.batch_size": 12})
    assert dict(resolved.config.mesh.shape) == {"data": -1}
