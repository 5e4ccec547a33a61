"""Requests: an experiment with features and settings, from the command line, a run file, or Python.

Example of a run file (YAML 1.2):

    experiment: llama2-7b
    features:
      - moe: {num_experts: 8, top_k: 2}
      - qk-norm
    target: tpu-v5p-1024
    set:
      max_steps: 2000

A file with `resolved: true` at the top level contains a complete config. `axlearn config show` and runs write such files.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from immutabledict import immutabledict

from axlearn_core.config import Decoder, Document, Names, Node, dump, encode, parse
from axlearn_core.config.assets import LocalRun, attach
from axlearn_core.config.files import read_regular
from axlearn_core.config.tree import matches
from axlearn_core.config.types import show
from axlearn_core.contracts.experiment import get_experiment_name
from axlearn_core.errors import SHOWN_PROBLEMS, ConfigError, Problem, RequestError, nearest
from axlearn_core.plugins.migrations import migrate_config


@attrs.frozen(kw_only=True)
class FeatureUse:
    """A requested feature.

    Attributes:
        name: Name of the feature.
        options: Options as plain data.
        location: Source of the request, for use in error messages.
    """

    name: str
    options: Mapping[str, Any] = immutabledict()
    location: str = "the request"

    @property
    def text(self) -> str:
        """Feature and options in the syntax of `--with`."""
        options = ",".join(f"{k}={format_value(v)}" for k, v in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@attrs.frozen(kw_only=True)
class Setting:
    """A requested value.

    Attributes:
        path: Path or pattern of the value.
        value: Value as plain data.
        location: Source of the request, for use in error messages.
    """

    path: str
    value: Any
    location: str = "the request"


@attrs.frozen(kw_only=True)
class Request:
    """A request for a config.

    Attributes:
        experiment: Name of an experiment, path of a YAML file, or config.
        features: Features to add to the experiment.
        without: Features of the file or the mesh rule to remove.
        settings: Values set on the command line or in Python. They are applied last.
        file_settings: Values set by the run file.
        base_settings: Values set by the files that the run file is based on, innermost first. Later values take precedence.
        target: Hardware to run on, or `none` to apply no mesh rule.
        title: Title of the run (default: name of the experiment).
        document: Parsed YAML of a complete config, for the locations of its values.
        layout: File with the parallel layout for training (see `contracts.request_layout`).
    """

    experiment: str | Path | Node[Any]
    features: tuple[FeatureUse, ...] = ()
    without: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    file_settings: tuple[Setting, ...] = ()
    base_settings: tuple[tuple[Setting, ...], ...] = ()
    target: str | None = None
    title: str = ""
    document: Document | None = None
    layout: str | Path | None = None

    @classmethod
    def from_arguments(
        cls,
        experiment: str | Path | Node[Any],
        *,
        with_: Iterable[str] | Mapping[str, Mapping[str, Any] | None] = (),
        without: Iterable[str] = (),
        set: Iterable[str] | Mapping[str, Any] = (),  # shadows the builtin to match --set
        steps: int | None = None,
        target: str | None = None,
        layout: str | Path | None = None,
    ) -> "Request":
        """Create a request from strings in command-line syntax (`"moe:top_k=2"`, `"max_steps=10"`) or from mappings."""
        if isinstance(with_, str) or isinstance(set, str):
            raise RequestError("with_ and set take a list of strings or a mapping, not one string")
        features = (
            [FeatureUse(name=n, options=o or {}) for n, o in with_.items()]
            if isinstance(with_, Mapping)
            else [parse_feature(text) for text in with_]
        )
        settings = (
            [Setting(path=p, value=v) for p, v in set.items()]
            if isinstance(set, Mapping)
            else [parse_setting(text) for text in set]
        )
        if steps is not None:
            settings.append(Setting(path="max_steps", value=steps, location=f"--steps {steps}"))
        return cls(
            experiment=experiment,
            features=tuple(features),
            without=tuple(without),
            settings=tuple(settings),
            target=target,
            layout=layout,
        )

    @property
    def words(self) -> list[str]:
        """Command-line arguments that make the same request."""
        words = [str(self.experiment)]
        words += [word for use in self.features for word in ("--with", use.text)]
        words += [word for name in self.without for word in ("--without", name)]
        words += [word for s in self.settings for word in ("--set", f"{s.path}={format_value(s.value)}")]
        words += [] if self.target is None else ["--target", self.target]
        return words if self.layout is None else [*words, "--layout", str(self.layout)]

    def remove_rule(self) -> "Request":
        """Return the request without its target and without the features to remove from the mesh rule."""
        names = {use.name for use in self.features}
        return attrs.evolve(self, target=None, without=tuple(n for n in self.without if n in names))

    def select_settings(self, path: str, existing: Collection[str]) -> Iterator[tuple[Setting, ...]]:
        """Yield the settings of a path and of the paths below it. Later settings take precedence.

        Args:
            path: A path.
            existing: Existing paths. Settings of these paths are included, whether given by name or by pattern. Settings of new
                paths below `path` are also included.
        """
        for settings in (*self.base_settings, self.file_settings, self.settings):
            fits = (s for s in settings if s.path.startswith(f"{path}.") or any(matches(s.path, p) for p in existing))
            if selection := tuple(fits):
                yield selection


_PLAIN = re.compile(r"[\w./~*-]+")
"""Matches strings that need no quotes in YAML, unless YAML reads them as another type."""


def format_value(value: Any) -> str:
    """Format a value for `--set`, which parses it back to the same value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {format_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value[0] != "*" and parse_value(value, "") == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def parse_feature(text: str, option: str = "--with") -> FeatureUse:
    """Parse a name with options: `moe:num_experts=8,top_k=2`. Values are YAML (`sizes=[1, 2]`, `name="a, b"`).

    Args:
        text: The name and its options.
        option: The command-line option, for use in error messages.
    """
    name, _, arguments = text.partition(":")
    location = f"{option} {text}"
    options: dict[str, Any] = {}
    for part in _split_options(arguments) if arguments.strip() else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RequestError(
                f"{location}: {part.strip()!r} is not an option\n    expected: {name}:key=value,key=value"
            )
        if key in options:
            raise RequestError(f"{location}: the option {key!r} is set twice")
        options[key] = parse_value(value, location)
    if not name.strip():
        raise RequestError(f"{location}: the name is missing\n    expected: {option} NAME[:key=value,...]")
    return FeatureUse(name=name.strip(), options=options, location=location)


def parse_setting(text: str) -> Setting:
    """Parse a setting: `model.decoder.num_layers=4`. The value is YAML."""
    path, equals, value = text.partition("=")
    location = f"--set {text}"
    if not equals or not path.strip():
        raise RequestError(f"{location}: expected PATH=VALUE")
    return Setting(path=path.strip(), value=parse_value(value, location), location=location)


def parse_value(text: str, location: str) -> Any:
    """Parse a YAML 1.2 value. Patterns such as `**.attention` do not need quotes."""
    if text.strip().startswith("*"):  # YAML would parse it as an alias, which is not supported here
        return text.strip()
    try:
        return parse(text, location).data
    except ConfigError as error:
        fix = "quote values that contain special characters: 'key=\"a: b\"'"
        raise ConfigError(attrs.evolve(p, location=location, fix=fix) for p in error.problems) from None


def _split_options(text: str) -> list[str]:
    """Split at commas, except inside brackets and quotes."""
    parts, depth, quote, last = [""], 0, "", "="
    for character in text:
        if quote:
            quote = "" if character == quote and last != "\\" else quote
        elif character in "'\"" and last in "=,[{: ":  # anywhere else, the quote is an apostrophe
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
        last = character
    return parts


def is_file(experiment: str | Path) -> bool:
    """Return True if an experiment is a file: a `Path`, a name ending in `.yaml` or `.yml`, or a name that contains a slash."""
    return isinstance(experiment, Path) or experiment.endswith((".yaml", ".yml")) or "/" in experiment


_KEYS = {"experiment": str, "features": list, "without": list, "target": str, "set": Mapping}
_EXPECTED = {str: "a string", list: "a list", Mapping: "a mapping"}


def read(path: str | Path, names: Names) -> Request:
    """Read a run file or a resolved config.

    Raises:
        ConfigError: If the contents are invalid. The error gives the line of every problem.
        RequestError: If the file cannot be read.
    """
    file = Path(path)
    try:
        text = read_regular(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a text file: {error}") from None
    except OSError as error:
        files = [p.name for p in file.parent.glob("*.y*ml") if p != file] if file.parent.is_dir() else []
        hint = "".join(f"\n    did you mean: {file.parent / n}?" for n in nearest(file.name, files, 1))
        raise RequestError(f"cannot read {path}: {error.strerror or error}{hint}") from None
    request = read_text(text, str(path), names, title=file.stem)
    if not isinstance(request.experiment, Node):
        return request
    run = LocalRun.from_config_file(file)
    config, _ = attach(request.experiment, run, earlier=run.has_lock)  # settings may replace lost assets
    return attrs.evolve(request, experiment=config)


def read_text(text: str, source: str, names: Names, title: str = "run") -> Request:
    """Parse the text of a run file or a resolved config. `source` is the name of the text in errors."""
    document = parse(text, source)
    data = document.data
    if not isinstance(data, Mapping):
        raise ConfigError(
            Problem(path="", message="is not a run file", got=show(data), expected="a mapping", location=source)
        )
    try:
        if "resolved" in data:
            return _parse_resolved_config(data, document, names, title)
        return _parse_run_file(data, document)
    except ConfigError as error:
        raise ConfigError(p if p.location else document.locate(p) for p in error.problems) from None


def _parse_resolved_config(data: Mapping[str, Any], document: Document, names: Names, title: str) -> Request:
    if data["resolved"] is not True:
        raise ConfigError(Problem(path="resolved", message="must be true", got=show(data["resolved"])))
    config = migrate_config({k: v for k, v in data.items() if k != "resolved"}, names)
    tree = Decoder(names).decode(config, Node)
    return Request(experiment=tree, title="" if get_experiment_name(tree) else title, document=document)


def _parse_run_file(data: Mapping[str, Any], document: Document) -> Request:
    problems = []
    for key, value in data.items():
        if key not in _KEYS:
            fix = "put config values under `set:`, or add `resolved: true` to a complete config"
            problems.append(
                Problem(
                    path=str(key),
                    message="unknown key in a run file",
                    expected=f"one of {', '.join(_KEYS)}",
                    nearest=nearest(str(key), _KEYS) if len(problems) < SHOWN_PROBLEMS else (),
                    fix=fix,
                )
            )
        elif not isinstance(value, _KEYS[key]):
            problems.append(Problem(path=key, message="wrong type", got=show(value), expected=_EXPECTED[_KEYS[key]]))
    if any(not str(path).strip() for path in data.get("set", {}) if isinstance(data.get("set"), Mapping)):
        problems.append(Problem(path="set", message="has an empty key", fix="use the path of a value as the key"))
    if "experiment" not in data:
        problems.append(Problem(path="", message="the experiment is missing", fix="add `experiment: NAME`"))
    if problems:
        raise ConfigError(problems)
    features = [_parse_feature_entry(f, f"features.{i}", document) for i, f in enumerate(data.get("features", ()))]
    settings = [
        Setting(path=str(p), value=v, location=_locate(document, f"set.{p}")) for p, v in data.get("set", {}).items()
    ]
    for i, name in enumerate(data.get("without", ())):
        if not isinstance(name, str):
            raise ConfigError(Problem(path=f"without.{i}", message="is not a feature name", got=show(name)))
    return Request(
        experiment=data["experiment"],
        features=tuple(features),
        without=tuple(data.get("without", ())),
        file_settings=tuple(settings),
        target=data.get("target"),
    )


def _parse_feature_entry(data: object, path: str, document: Document) -> FeatureUse:
    location = _locate(document, path)
    if isinstance(data, str):
        return FeatureUse(name=data, location=location)
    if isinstance(data, Mapping) and len(data) == 1:
        (name, options), *_ = data.items()
        if isinstance(name, str) and isinstance(options, Mapping | None):
            return FeatureUse(name=name, options=options or {}, location=location)
    expected = "`- NAME` or `- NAME: {option: value}`"
    raise ConfigError(Problem(path=path, message="is not a feature", got=show(data), expected=expected))


def _locate(document: Document, path: str) -> str:
    return document.locate(Problem(path=path, message="")).location or document.source


def write(config: Node[Any], names: Names) -> str:
    """Return the text of a config file, which `read` can read.

    Raises:
        RequestError: If a node is not registered as a component, or if a value cannot be serialized.
    """
    return dump({"resolved": True, **encode(config, names)})


def merge_file(request: Request, names: Names) -> Request:
    """Merge a request with its run file and the files that the run file is based on."""
    if isinstance(request.experiment, Node) or not is_file(request.experiment):
        return request
    file = _read_chain(str(request.experiment), names)
    merged = {
        "features": file.features + request.features,
        "without": file.without + request.without,
        "file_settings": file.file_settings + request.file_settings,
    }
    target = request.target or file.target
    return attrs.evolve(file, **merged, settings=request.settings, target=target, layout=request.layout)


def _read_chain(name: str, names: Names, visited: tuple[str, ...] = ()) -> Request:
    """Read a run file and merge it with the file that it is based on, which may be the config of a run."""
    if name in visited:
        raise RequestError(f"run files refer to each other in a cycle: {' -> '.join((*visited, name))}")
    file = read(name, names)
    if isinstance(file.experiment, Node) or not is_file(file.experiment):
        return file
    base = _read_chain(str(file.experiment), names, (*visited, name))
    return attrs.evolve(
        base,
        features=_override_features(base.features, file.features),
        without=(*base.without, *file.without),
        base_settings=(*base.base_settings, base.file_settings),
        file_settings=file.file_settings,
        target=file.target or base.target,
    )


def _override_features(base: Sequence[FeatureUse], overrides: Sequence[FeatureUse]) -> tuple[FeatureUse, ...]:
    """Merge the features of a base file and a file that overrides it. Options in the second file take precedence."""
    later = {use.name: use for use in overrides}
    merged = [
        attrs.evolve(use, options={**use.options, **later[use.name].options}) if use.name in later else use
        for use in base
    ]
    base_names = [use.name for use in base]
    return (*merged, *(attrs.evolve(use, options={}) if use.name in base_names else use for use in overrides))


def merge_uses(first: FeatureUse, second: FeatureUse) -> FeatureUse:
    """Merge two uses of a feature. Raise `RequestError` if they set an option to two different values."""
    for key in first.options.keys() & second.options.keys():
        a, b = first.options[key], second.options[key]
        if a != b or type(a) is not type(b):
            raise RequestError(
                f"the feature {first.name!r} has two values for {key!r}: {show(a)} by {first.location}, "
                f"{show(b)} by {second.location}\n    fix: keep one of them"
            )
    location = first.location if second.location == first.location else f"{first.location} and {second.location}"
    return attrs.evolve(first, options={**first.options, **second.options}, location=location)
