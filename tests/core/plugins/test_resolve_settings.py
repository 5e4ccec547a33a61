"""From a request to a config: removed features, unset values, explanations, and files."""

import pytest

from axlearn_core.config import ABSENT, Configurable, diff, patch
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve

pytestmark = pytest.mark.usefixtures("toy")


def chain(resolved, path):
    return [(step.source, step.old, step.new) for step in resolved.explain(path)[path]]


def test_without():
    request = Request.from_arguments("toy", with_=["toy-wide", "toy-rope"], without=["toy-wide"])
    assert [n for n, _ in resolve(request).features] == ["toy-rope"]
    with pytest.raises(
        RequestError, match=r"--without toy-wide: this feature is not requested\n    requested: toy-rope"
    ):
        resolve("toy", with_=["toy-rope"], without=["toy-wide"])


def test_missing_and_invalid_values():
    with pytest.raises(ConfigError, match=r"model.num_layers: Decoder.Config needs a value"):
        resolve("unfinished").check()
    resolved = resolve("toy", set=["model.attention.num_kv_heads=3"])
    with pytest.raises(ConfigError, match=r"set by --set model.attention.num_kv_heads=3: .*does not divide num_heads"):
        resolved.check()
    assert resolve("toy").check().title == "toy"


def test_explaining_paths_that_are_not_there():
    resolved = resolve("toy", set=["tags=[a]"])
    with pytest.raises(ConfigError, match="did you mean: max_steps"):
        resolved.explain("max_step")
    with pytest.raises(ConfigError, match="passed by the parent"):
        resolved.explain("model.attention.dim")
    assert list(resolved.explain("tags.0")) == ["tags"]


def test_resolved_configs_go_to_a_file_and_back(tmp_path):
    resolved = resolve(
        "toy", with_=["toy-rope:theta=9", "toy-moe:num_experts=4"], set=["tags=[a, 'no']", "**.num_kv_heads=2"]
    )
    file = tmp_path / "config.yaml"
    file.write_text(resolved.to_yaml())
    again = resolve(file)
    assert again.config == resolved.config
    assert again.to_yaml() == resolved.to_yaml()
    line = next(i for i, t in enumerate(file.read_text().splitlines(), 1) if "max_steps" in t)
    assert chain(again, "max_steps") == [(f"{file}:{line}", ABSENT, 100)]
    assert resolve(file, set=["max_steps=2"], with_=["toy-needy", "toy-rope:theta=9"]).config.max_steps == 2


def test_a_run_file_stands_on_another_file(tmp_path):
    base, run, loop = (tmp_path / f"{n}.yaml" for n in ("base", "run", "loop"))
    base.write_text(resolve("quickstart", set={"seed": 3, "max_steps": 7}).to_yaml())
    run.write_text(f"experiment: {base}\nfeatures: [{{ema: {{}}}}]\nset: {{max_steps: 9}}\n")
    result = resolve(run, set={"log_every_steps": 2})
    assert (result.config.seed, result.config.max_steps, result.config.log_every_steps) == (3, 9, 2)
    assert [name for name, _ in result.features] == ["ema"]
    assert result.setter("max_steps") == f"set by {run}:3"
    loop.write_text(f"experiment: {loop}\n")
    with pytest.raises(RequestError, match="refer to each other in a cycle"):
        resolve(loop)


def test_a_run_file_overrides_the_run_file_that_it_stands_on(tmp_path):
    base, run, top = (tmp_path / f"{n}.yaml" for n in ("base", "run", "top"))
    base.write_text("experiment: quickstart\nfeatures: [ema: {decay: 0.9}, remat: {}]\nset: {max_steps: 7, seed: 3}\n")
    run.write_text(f"experiment: {base}\nfeatures: [ema: {{decay: 0.5}}]\nwithout: [remat]\nset: {{max_steps: 9}}\n")
    top.write_text(f"experiment: {run}\nset: {{'*_steps': 4}}\n")
    result = resolve(run)
    assert (result.config.max_steps, result.config.seed, result.config.learner.ema_decay) == (9, 3, 0.5)
    assert [name for name, _ in result.features] == ["ema"]
    assert [step.source for step in result.provenance["max_steps"]][-2:] == [f"{base}:3", f"{run}:4"]
    assert resolve(top).config.max_steps == 4
    assert resolve(top, set=["max_steps=2"]).config.max_steps == 2
    with pytest.raises(RequestError, match=r"ema.*two values.*decay"):  # the command line is no file: it says so once
        resolve(run, with_=["ema:decay=0.1"])


def test_a_tuple_of_nodes_and_unset_values_go_to_a_file_and_back(tmp_path):
    import toy_parts

    tree = patch(toy_parts.unfinished(), {"parts": (toy_parts.Rotary.Config(theta=2.0), toy_parts.Attention.Config())})
    file = tmp_path / "c.yaml"
    file.write_text(resolve(tree).to_yaml())
    assert resolve(file).config == tree


def test_a_node_without_a_name_cannot_be_written():
    class Local(Configurable):
        pass

    resolved = resolve("toy", set={"model.attention.position": Local.Config()})
    with pytest.raises(RequestError, match="Local is not registered as a component"):
        resolved.to_yaml()


def test_a_request_takes_no_second_set_of_options():
    with pytest.raises(TypeError):
        resolve(Request.from_arguments("toy"), steps=3)
    assert not diff(resolve(Request.from_arguments("toy")).config, resolve("toy").config)
