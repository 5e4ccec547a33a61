"""Whether the Neuron SDK is installed, or what PyPI has under its names. Imports no JAX."""

from importlib import metadata

from packaging.version import Version

FLOORS = {"jax-neuronx": "0.1.3", "libneuronxla": "2.2", "neuronx-cc": "2.17"}
"""What the extra `sdk` asks for. Everything on PyPI is older: it is there to hold the names."""


def missing(needed: tuple[str, ...] = tuple(FLOORS)) -> str | None:
    """Why the SDK cannot be used, and what to do about it; None where it can."""
    wrong = []
    for name in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if Version(version) < Version(FLOORS[name]):
            wrong.append(f"{name} {version} is a placeholder or too old (at least {FLOORS[name]})")
    if not wrong:
        return None
    return (
        f"{'; '.join(wrong)}: install the Neuron SDK from AWS's package index, whose address and option are in AWS's "
        "documentation (pip install 'axlearn-plugins-neuron[sdk]'); PyPI has placeholders under these names"
    )
