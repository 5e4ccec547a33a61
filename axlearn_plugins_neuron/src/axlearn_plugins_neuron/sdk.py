"""Check whether the Neuron SDK is installed, as opposed to its placeholders on PyPI. Does not import JAX."""

from importlib import metadata

from packaging.version import Version

FLOORS = {"jax-neuronx": "0.1.3", "libneuronxla": "2.2", "neuronx-cc": "2.17"}
"""Minimum versions, as in the `sdk` extra. All versions on PyPI are older placeholders that reserve the names."""


def unavailable_reason(packages: tuple[str, ...] = tuple(FLOORS)) -> str | None:
    """Return why the SDK cannot be used, with a fix, or None if it can."""
    problems = []
    for name in packages:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        if Version(version) < Version(FLOORS[name]):
            problems.append(f"{name} {version} is a placeholder or too old (requires {FLOORS[name]} or later)")
    if not problems:
        return None
    return (
        f"{'; '.join(problems)}: install the Neuron SDK from AWS's package index, as AWS's documentation describes "
        "(pip install 'axlearn-plugins-neuron[sdk]'); the packages on PyPI are placeholders"
    )
