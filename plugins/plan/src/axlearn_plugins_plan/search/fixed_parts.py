"""Find the parts of a layout that a request already sets. A search does not change them."""

from collections.abc import Sequence

from axlearn_core.config.tree import matches
from axlearn_core.errors import RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, merge_file

PATHS = {
    "mesh": "mesh.shape",
    "stream": "mesh.rules.activation_embed",
    "remat": "**.remat",
    "gradient-accumulation": "learner.accumulate_steps",
    "offload-optimizer": "learner.offload",
    "optimizer-precision": "learner.state_dtype",
    "batch": "input.batch_size",
}
"""Part of a layout -> config path. Parts that a feature sets have the feature's name. `pipeline` has no path."""


def fixed_parts(request: Request) -> frozenset[str]:
    """Return the parts that the command line or the run file sets: by a feature, by `without`, or by a value.

    A layout must not set these parts again. Otherwise the same feature would have two values, or the request's value would
    override the layout's.
    """
    request = merge_file(request, registry())
    features = {use.name for use in request.features} | {*request.without}
    levels = (request.settings, request.file_settings, *request.base_settings)
    paths = [setting.path for level in levels for setting in level]
    by_value = {part for part, path in PATHS.items() if any(_overlap(p, path) for p in paths)}
    return frozenset(by_value | (features & {*PATHS, "pipeline"}))


def check_varied(vary: Sequence[str], kept_parts: frozenset[str]) -> None:
    """Raise `RequestError` if `--vary` names a part that the request sets."""
    for name in vary:
        if name in kept_parts:
            raise RequestError(
                f"--vary {name} conflicts with the request, which sets {PATHS[name]} or the feature {name}\n"
                "    fix: remove one of them",
            )


def _overlap(setting: str, path: str) -> bool:
    """Return whether a setting affects the path, one of its ancestors, or one of its descendants. Both may be patterns."""
    path_parts, setting_parts = path.split("."), setting.split(".")
    above = any(matches(setting, ".".join(path_parts[:n])) for n in range(1, len(path_parts) + 1))
    return above or any(matches(path, ".".join(setting_parts[:n])) for n in range(1, len(setting_parts) + 1))
