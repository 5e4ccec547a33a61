"""The OpenAPI document describes each path of the application, and its references resolve."""

import re

import pytest

from axlearn_plugins_serving.server.app import _routes
from axlearn_plugins_serving.server.openapi import document, package_version


def references(part):
    """Yield the names of the schemas that a part of the document refers to."""
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"].removeprefix("#/components/schemas/")
        part = list(part.values())
    if isinstance(part, list):
        for child in part:
            yield from references(child)


@pytest.mark.parametrize("route", _routes(), ids=lambda route: f"{route.path} {'-'.join(sorted(route.methods))}")
def test_each_route_is_described(route):
    operations = document()["paths"][re.sub(r":path}$", "}", route.path)]
    for method in route.methods - {"HEAD"}:
        assert operations[method.lower()]["summary"]
        assert "200" in operations[method.lower()]["responses"]


def test_references_resolve_and_each_schema_is_used():
    text = document()
    assert set(references(text)) == set(text["components"]["schemas"])
    assert text["info"]["version"] == package_version()


def test_the_prefix_of_a_proxy_is_the_server():
    assert document()["servers"] == [{"url": "/"}]
    assert document("/llm")["servers"] == [{"url": "/llm"}]
