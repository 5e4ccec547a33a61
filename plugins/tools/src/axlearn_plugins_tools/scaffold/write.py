"""Create a plugin package from the files in `template/`."""

import re
from pathlib import Path
from string import Template

from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import GROUPS, Registry

TEMPLATE = Path(__file__).with_name("template")


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
    package = f"axlearn_plugins_{name.replace('-', '_')}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise RequestError(
            f"{name!r} is not a valid plugin name\n    expected: lower-case words joined by hyphens, such as my-norm"
        )
    for group in GROUPS:
        for entry in registry.claims[group].get(name, ()):
            raise RequestError(f"the name {name!r} is already used by the {entry}\n    fix: choose another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} already exists\n    fix: use another --path, or remove it")
    major, minor, *_ = version.split(".")
    values = {
        "name": name,
        "distribution": f"axlearn-plugins-{name}",
        "package": package,
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "version": f"{major}.{minor}",
        "next_version": f"{major}.{int(minor) + 1}",
    }
    sources = sorted(TEMPLATE.rglob("*.template"))
    targets = [
        folder / str(s.relative_to(TEMPLATE)).replace("PACKAGE", package).removesuffix(".template") for s in sources
    ]
    try:
        for source, target in zip(sources, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}\n    fix: use another --path") from error
    return targets
