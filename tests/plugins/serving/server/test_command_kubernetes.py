"""The example for Kubernetes: its command, its probes and its time to drain."""

import pytest
from ruamel.yaml import YAML
from test_images import VERSION, values

from axlearn_plugins_serving.server.app import _routes
from axlearn_plugins_serving.server.command import serve
from axlearn_plugins_serving.server.limits import OPEN_PATHS
from support.paths import ROOT


@pytest.fixture(scope="module")
def manifests():
    text = (ROOT / "examples/serving/kubernetes.yaml").read_text("utf-8")
    return {manifest["kind"]: manifest for manifest in YAML(typ="safe").load_all(text)}


@pytest.fixture(scope="module")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]["spec"]


def test_the_image_is_our_own(pod):
    (container,) = pod["containers"]
    assert container["image"] == f"REGISTRY/axlearn:{VERSION}"
    assert values("cpu", "ENTRYPOINT") == ['["axlearn"]']
    assert values("cpu", "USER") == [f"{pod['securityContext']['runAsUser']}:1000"]


def test_the_command_is_valid_and_drains_in_time(pod):
    (container,) = pod["containers"]
    name, *words = container["args"]
    assert name == "serve"
    params = serve.make_context("serve", words).params
    assert params["api_key_env"] in {variable["name"] for variable in container["env"]}
    seconds = params["grace"] + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert seconds + 5 <= pod["terminationGracePeriodSeconds"]


def test_probes_need_no_key_and_reach_the_port(manifests, pod):
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == 8000
    for kind in ("startupProbe", "readinessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in OPEN_PATHS & {route.path for route in _routes()}
        assert probe["port"] == port["name"]
    (target,) = manifests["Service"]["spec"]["ports"]
    assert target["targetPort"] == port["name"]
    assert manifests["Service"]["spec"]["selector"] == manifests["Deployment"]["spec"]["selector"]["matchLabels"]
