"""The parts of a layout that a request sets itself, which a search keeps."""

from collections.abc import Sequence

from axlearn_core.config.tree import matches
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, with_file

PATHS = {
    "mesh": "mesh.shape",
    "stream": "mesh.rules.activation_embed",
    "remat": "**.remat",
    "gradient-accumulation": "learner.accumulate_steps",
    "offload-optimizer": "learner.offload",
    "optimizer-precision": "learner.state_dtype",
    "batch": "input.batch_size",
}
"""Part of a layout -> the path of its value. Parts that a feature sets have the feature's name; `pipeline` has no path."""


def held_parts(request: Request) -> frozenset[str]:
    """The parts that the command line or the run file sets: by a feature, by `without`, or by a value.

    A layout that set them a second time could not be reproduced beside the request: one feature would get two values, or the
    request's value would win.
    """
    request = with_file(request, registry())
    features = {use.name for use in request.features} | {*request.without}
    levels = (request.settings, request.file_settings, *request.base_settings)
    paths = [setting.path for level in levels for setting in level]
    by_value = {part for part, path in PATHS.items() if any(_overlap(p, path) for p in paths)}
    return frozenset(by_value | (features & {*PATHS, "pipeline"}))


def check_varied(vary: Sequence[str], kept_parts: frozenset[str]) -> None:
    """Raises `RequestError` where `--vary` names a part that the request sets."""
    for name in vary:
        if name in kept_parts:
            source = f"what the request sets ({PATHS[name]}, or the feature {name})"
            raise RequestError(
                f"--vary {name} and {source} ask for two things\n    fix: leave one of them out",
            )


def _overlap(setting: str, path: str) -> bool:
    """Whether a setting reaches the path, something above it, or something below it; both may be patterns."""
    parts, own = path.split("."), setting.split(".")
    above = any(matches(setting, ".".join(parts[:n])) for n in range(1, len(parts) + 1))
    return above or any(matches(path, ".".join(own[:n])) for n in range(1, len(own) + 1))
