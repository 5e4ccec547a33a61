"""Layout files, which set how training runs on a machine but not what it computes. `--layout FILE` reads a layout file.

layout: 1
experiment: llama2-70b
model: 5f0c...        # hash of what the model computes and of the shapes of its batches
target: h100-8x64
with: ["remat:save=[query,key,value]"]
set: {mesh.shape: {fsdp: 64, tensor: 8}}
varies: []            # parts of the model that the layout may change, from a search with --vary
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import Node, diff, dump, parse
from axlearn_core.config.kinds import change_kinds, mathematics
from axlearn_core.config.types import show
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest, reason
from axlearn_core.plugins.request import Setting, parse_feature

FORMAT = 1
_KEYS = {
    "layout": int, "experiment": str, "model": str, "target": str, "with": list, "set": Mapping, "varies": list,
}  # fmt: skip


@attrs.frozen(kw_only=True)
class LayoutFile:
    """A layout for a model on a machine. See `axlearn_core.contracts.request_layout.RequestLayout`.

    Attributes:
        experiment: Experiment that the layout was found for. For information only.
        model: `model_hash` of the config with the layout.
        target: The machine.
        features: Values of `--with`.
        settings: Path -> value of `--set`.
        varies: Config paths at which the layout may change what the model computes.
        source: Path of the file, for error messages.
    """

    experiment: str
    model: str
    target: str
    features: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    varies: tuple[str, ...] = ()
    source: str = "layout"

    def write(self, path: Path) -> None:
        """Write the file."""
        data = {
            "layout": FORMAT,
            "experiment": self.experiment,
            "model": self.model,
            "target": self.target,
            "with": list(self.features),
            "set": dict(self.settings),
            "varies": list(self.varies),
        }
        path.write_text(dump(data), encoding="utf-8")

    def apply(self, request: Any) -> Any:
        """Apply the layout to a request. See `RequestLayout`."""
        if request.target is not None and request.target != self.target:
            raise RequestError(
                f"{self.source} is a layout for a different machine\n    got: --target {request.target}\n"
                f"    expected: {self.target}\n    fix: remove --target, or search again: "
                f"axlearn plan search {self.experiment} --target {request.target}"
            )
        features = [attrs.evolve(parse_feature(text), location=self.source) for text in self.features]
        settings = [Setting(path=p, value=v, location=self.source) for p, v in self.settings.items()]
        return attrs.evolve(
            request,
            layout=None,
            target=self.target,
            features=(*request.features, *features),
            file_settings=(*request.file_settings, *settings),
        )

    def check(self, before: Node[Any], after: Node[Any]) -> None:
        """Raise `RequestError` if the layout does not match the model. See `RequestLayout`."""
        if (digest := model_hash(after)) != self.model:
            raise RequestError(
                f"{self.source} is a layout for a different model or different batches\n    got: {digest}\n"
                f"    expected: {self.model}, for {self.experiment} with the search's options\n"
                f"    fix: search for this model: axlearn plan search ... --target {self.target} --layout-out FILE"
            )
        kinds = change_kinds(diff(before, after), before, after)
        wrong = [c.path for c, kind in kinds if kind not in ("execution", "microbatches") and not self._varies(c.path)]
        if wrong:
            raise RequestError(
                f"{self.source} changes the computation, but a layout must not\n    got: {', '.join(wrong[:4])}\n"
                "    fix: remove these lines, and set the values on the command line or in a run file"
            )

    def _varies(self, path: str) -> bool:
        return any(path == v or path.startswith(f"{v}.") for v in self.varies)


def model_hash(config: Any) -> str:
    """Return a hash of what the model computes and of the shapes of its batches, as twelve hex digits."""
    settings = mathematics(config.model)
    batches = config.input.batch_shapes() if isinstance(config.input, DeclaresBatches) else {}
    shapes = {name: list(shape) for name, (shape, _) in batches.items()}
    text = json.dumps([{path: show(value) for path, value in settings.items()}, shapes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_layout(path: str | Path) -> LayoutFile:
    """Read a layout file.

    Raises:
        RequestError: The file cannot be read.
        ConfigError: The file is not a valid layout file. The error lists every problem with its line number.
    """
    file = Path(path)
    try:
        document = parse(file.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the layout {path}: {reason(error)}") from None
    data = document.data
    if not isinstance(data, Mapping) or "layout" not in data:
        raise ConfigError(
            Problem(
                path="",
                message="is not a layout file",
                got=show(data),
                expected="`layout: 1` and the other keys that `axlearn plan search --layout-out` writes",
                location=str(path),
            )
        )
    problems = [
        Problem(
            path=str(k),
            message="unknown key in a layout file",
            expected=", ".join(_KEYS),
            nearest=nearest(str(k), _KEYS),
        )
        for k in data
        if k not in _KEYS
    ]
    for key, kind in _KEYS.items():
        if key in data and (not isinstance(data[key], kind) or isinstance(data[key], bool)):
            problems.append(Problem(path=key, message="wrong type", got=show(data[key])))
        elif key not in data and key in ("model", "target"):
            problems.append(Problem(path=key, message="is missing"))
    if not problems and data["layout"] != FORMAT:
        message = "another version of this file format"
        problems.append(Problem(path="layout", message=message, got=show(data["layout"]), expected=str(FORMAT)))
    if problems:
        raise ConfigError(document.locate(p) for p in problems)
    return LayoutFile(
        experiment=data.get("experiment", "the experiment"),
        model=data["model"],
        target=data["target"],
        features=tuple(str(f) for f in data.get("with", ())),
        settings=dict(data.get("set", {})),
        varies=tuple(str(v) for v in data.get("varies", ())),
        source=str(path),
    )
