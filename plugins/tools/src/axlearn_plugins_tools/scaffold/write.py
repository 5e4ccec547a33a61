"""Create a plugin package from the files in `template/` or `family_template/`."""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import GROUPS, Registry

TEMPLATE, FAMILY_TEMPLATE = Path(__file__).with_name("template"), Path(__file__).with_name("family_template")


def write_plugin(name: str, folder: Path, registry: Registry, version: str) -> list[Path]:
    """Write a package with a layer, a feature, tests and entry points to `folder`.

    Args:
        name: Name of the layer and the feature, in kebab-case.
        folder: A directory that does not exist or is empty.
        registry: Installed names. `name` must not be among them.
        version: Version of axlearn-core.

    Returns:
        The written files.

    Raises:
        RequestError: If the name is invalid or in use, or the folder is not empty or not writable.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise RequestError(
            f"{name!r} is not a valid plugin name\n    expected: lower-case words joined by hyphens, such as my-norm"
        )
    _check_names((name,), registry)
    class_name = "".join(word.capitalize() for word in name.split("-"))
    return _write(TEMPLATE, name, folder, version, {"class_name": class_name})


def write_family(
    model_type: str, like: str, description: Mapping[str, Any], folder: Path, registry: Registry, version: str
) -> list[Path]:
    """Write a package with a family of Hugging Face models, an experiment, tests and entry points to `folder`.

    Args:
        model_type: `model_type` of the new family.
        like: `model_type` of the installed family that it begins as a copy of.
        description: Result of `describe_family` of axlearn-plugins-models for `like`.
        folder: A directory that does not exist or is empty.
        registry: Installed names. The family and its experiment must not be among them.
        version: Version of axlearn-core.

    Returns:
        The written files.

    Raises:
        RequestError: If the name is invalid or in use, or the folder is not empty or not writable.
    """
    words = check_family(model_type, registry)
    class_name = "".join(word.capitalize() for word in words)
    if class_name == description["class_name"]:
        class_name = f"New{class_name}"
    data = {**description["config_json"], "model_type": model_type, "architectures": [f"{class_name}ForCausalLM"]}
    tensors = {name: tuple(shape) for name, shape in description["tensors"].items()}
    packages = sorted({"axlearn-plugins-models", description["distribution"]})
    values = {
        "model_type": model_type,
        "class_name": class_name,
        "like": like,
        "like_module": description["module"],
        "like_class": description["class_name"],
        "requirements": ", ".join(f'"{package}>=0.1,<0.2"' for package in packages),
        "config_json": _literal(data),
        "tensors": _literal(tensors),
    }
    return _write(FAMILY_TEMPLATE, "-".join(words), folder, version, values)


def check_family(model_type: str, registry: Registry) -> list[str]:
    """Return the words of a new `model_type`. Raise `RequestError` if it is invalid or in use."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", model_type):
        raise RequestError(
            f"{model_type!r} is not a valid name of a family\n"
            "    expected: lower-case words joined by underscores, as model_type in config.json, such as olmo2 or qwen3_moe"
        )
    words = re.split("[-_]", model_type)
    _check_names((f"huggingface-{model_type}", f"{'-'.join(words)}-toy"), registry)
    return words


def _literal(data: Mapping[str, Any]) -> str:
    """Return a dictionary as Python source, with one entry per line."""
    lines = (f"    {name!r}: {value!r},\n" for name, value in data.items())
    return "{\n" + "".join(lines).replace("'", '"') + "}"


def _check_names(names: tuple[str, ...], registry: Registry) -> None:
    for name in names:
        for group in GROUPS:
            for entry in registry.claims[group].get(name, ()):
                raise RequestError(f"the name {name!r} is already used by the {entry}\n    fix: choose another name")


def _write(template: Path, name: str, folder: Path, version: str, facts: Mapping[str, str]) -> list[Path]:
    """Write the files of a template. `facts` are the values that only this template has."""
    package = f"axlearn_plugins_{name.replace('-', '_')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} already exists\n    fix: use another --path, or remove it")
    major, minor, *_ = version.split(".")
    values = {
        "name": name,
        "distribution": f"axlearn-plugins-{name}",
        "package": package,
        "version": f"{major}.{minor}",
        "next_version": f"{major}.{int(minor) + 1}",
        **facts,
    }
    sources = sorted(template.rglob("*.template"))
    targets = [
        folder / str(s.relative_to(template)).replace("PACKAGE", package).removesuffix(".template") for s in sources
    ]
    try:
        for source, target in zip(sources, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}\n    fix: use another --path") from error
    return targets
