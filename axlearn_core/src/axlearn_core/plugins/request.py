"""What a user asks for: an experiment, features, settings; from the command line, a run file, or Python.

A run file (YAML 1.2):

    experiment: llama2-7b
    features:
      - moe: {num_experts: 8, top_k: 2}
      - qk-norm
    target: tpu-v5p-1024
    set:
      max_steps: 2000

A file with `resolved: true` at the top is a whole config instead, as `axlearn config show` and every run write it.
"""

import json
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
from axlearn_core.errors import SHOWN_PROBLEMS, ConfigError, Problem, RequestError, nearest
from axlearn_core.plugins.migrations import migrate_config


@attrs.frozen(kw_only=True)
class FeatureUse:
    """A feature that is asked for, with its options as plain data, and where that was said."""

    name: str
    options: Mapping[str, Any] = immutabledict()
    location: str = "the request"

    @property
    def text(self) -> str:
        """As `--with` takes it."""
        options = ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in self.options.items())
        return f"{self.name}:{options}" if options else self.name


@attrs.frozen(kw_only=True)
class Setting:
    """A value for a path or pattern, as plain data, and where that was said."""

    path: str
    value: Any
    location: str = "the request"


@attrs.frozen(kw_only=True)
class Request:
    """All that a user asked for.

    Attributes:
        experiment: the name of an experiment, a YAML file, or a config.
        features: the features to add to it.
        without: features that the file or the target's mesh rule asks for, and that are to be left out.
        settings: values set on the command line or from Python; they come last.
        file_settings: values set by the run file.
        base_settings: those of the files that the run file stands on, the innermost first; a later one overrides.
        target: the hardware to run on; `none` for no mesh rule.
        title: what the run is called; by default the experiment's name.
        layout: a file of settings that lay the training over a machine (`contracts.request_layout`).
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
    def of(
        cls,
        experiment: str | Path | Node[Any],
        *,
        with_: Iterable[str] | Mapping[str, Mapping[str, Any] | None] = (),
        without: Iterable[str] = (),
        set: Iterable[str] | Mapping[str, Any] = (),  # what it is called on the command line
        steps: int | None = None,
        target: str | None = None,
        layout: str | Path | None = None,
    ) -> "Request":
        """A request from the forms of the command line (`"moe:top_k=2"`, `"max_steps=10"`) or from mappings."""
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

    def without_rule(self) -> "Request":
        """The request, without what is for a mesh rule."""
        names = {use.name for use in self.features}
        return attrs.evolve(self, target=None, without=tuple(n for n in self.without if n in names))

    def settings_of(self, path: str, existing: Collection[str]) -> Iterator[tuple[Setting, ...]]:
        """The settings of a path and of what is below it, the later ones last.

        Args:
            path: a path.
            existing: the paths whose settings count, by name or by pattern; what is new below `path` counts too.
        """
        for settings in (*self.base_settings, self.file_settings, self.settings):
            fits = (s for s in settings if s.path.startswith(f"{path}.") or any(matches(s.path, p) for p in existing))
            if chosen := tuple(fits):
                yield chosen


def parse_feature(text: str) -> FeatureUse:
    """`moe:num_experts=8,top_k=2` as a feature with options; values are YAML (`sizes=[1, 2]`, `name="a, b"`)."""
    name, _, rest = text.partition(":")
    location = f"--with {text}"
    options: dict[str, Any] = {}
    for part in _split(rest) if rest.strip() else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise RequestError(
                f"{location}: {part.strip()!r} is not an option\n    expected: {name}:key=value,key=value"
            )
        if key in options:
            raise RequestError(f"{location}: the option {key!r} is given twice")
        options[key] = parse_value(value, location)
    if not name.strip():
        raise RequestError(f"{location}: names no feature\n    expected: --with FEATURE[:key=value,...]")
    return FeatureUse(name=name.strip(), options=options, location=location)


def parse_setting(text: str) -> Setting:
    """`model.decoder.num_layers=4` as a setting; the value is YAML."""
    path, equals, value = text.partition("=")
    location = f"--set {text}"
    if not equals or not path.strip():
        raise RequestError(f"{location}: expected PATH=VALUE")
    return Setting(path=path.strip(), value=parse_value(value, location), location=location)


def parse_value(text: str, location: str) -> Any:
    """One YAML 1.2 value; a pattern such as `**.attention` needs no quotes."""
    if text.strip().startswith("*"):  # in YAML an alias, which means nothing here
        return text.strip()
    try:
        return parse(text, location).data
    except ConfigError as error:
        fix = "quote a value that has a special character: 'key=\"a: b\"'"
        raise ConfigError(attrs.evolve(p, location=location, fix=fix) for p in error.problems) from None


def _split(text: str) -> list[str]:
    """Splits at commas that are in no bracket and no quote."""
    parts, depth, quote, last = [""], 0, "", "="
    for character in text:
        if quote:
            quote = "" if character == quote and last != "\\" else quote
        elif character in "'\"" and last in "=,[{: ":  # elsewhere it is an apostrophe
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
    """Whether the name of an experiment means a file: by its ending, or because it has a folder in it."""
    return isinstance(experiment, Path) or experiment.endswith((".yaml", ".yml")) or "/" in experiment


_KEYS = {"experiment": str, "features": list, "without": list, "target": str, "set": Mapping}
_EXPECTED = {str: "a string", list: "a list", Mapping: "a mapping"}


def read(path: str | Path, names: Names) -> Request:
    """A run file or a resolved config as a request; raises `ConfigError` with the line of every problem."""
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
    run = LocalRun.of_config(file)
    config, _ = attach(request.experiment, run, earlier=run.has_lock)  # settings may replace what is lost
    return attrs.evolve(request, experiment=config)


def read_text(text: str, source: str, names: Names, title: str = "run") -> Request:
    """`read` for text that is already here; `source` is what errors call it."""
    document = parse(text, source)
    data = document.data
    if not isinstance(data, Mapping):
        raise ConfigError(
            Problem(path="", message="is not a run file", got=show(data), expected="a mapping", location=source)
        )
    try:
        if "resolved" in data:
            return _resolved_request(data, document, names, title)
        return _run(data, document)
    except ConfigError as error:
        raise ConfigError(p if p.location else document.locate(p) for p in error.problems) from None


def _resolved_request(data: Mapping[str, Any], document: Document, names: Names, title: str) -> Request:
    if data["resolved"] is not True:
        raise ConfigError(Problem(path="resolved", message="can only be true", got=show(data["resolved"])))
    config = migrate_config({k: v for k, v in data.items() if k != "resolved"}, names)
    tree = Decoder(names).decode(config, Node)
    return Request(experiment=tree, title=title, document=document)


def _run(data: Mapping[str, Any], document: Document) -> Request:
    problems = []
    for key, value in data.items():
        if key not in _KEYS:
            fix = "a whole config needs `resolved: true`; values of the config go below `set:`"
            problems.append(
                Problem(
                    path=str(key),
                    message="unknown key of a run file",
                    expected=f"one of {', '.join(_KEYS)}",
                    nearest=nearest(str(key), _KEYS) if len(problems) < SHOWN_PROBLEMS else (),
                    fix=fix,
                )
            )
        elif not isinstance(value, _KEYS[key]):
            problems.append(Problem(path=key, message="wrong type", got=show(value), expected=_EXPECTED[_KEYS[key]]))
    if any(not str(path).strip() for path in data.get("set", {}) if isinstance(data.get("set"), Mapping)):
        problems.append(Problem(path="set", message="has a key that names nothing", fix="give the path of a value"))
    if "experiment" not in data:
        problems.append(Problem(path="", message="names no experiment", fix="add `experiment: NAME`"))
    if problems:
        raise ConfigError(problems)
    features = [_feature(f, f"features.{i}", document) for i, f in enumerate(data.get("features", ()))]
    settings = [
        Setting(path=str(p), value=v, location=_line(document, f"set.{p}")) for p, v in data.get("set", {}).items()
    ]
    for i, name in enumerate(data.get("without", ())):
        if not isinstance(name, str):
            raise ConfigError(Problem(path=f"without.{i}", message="is not the name of a feature", got=show(name)))
    return Request(
        experiment=data["experiment"],
        features=tuple(features),
        without=tuple(data.get("without", ())),
        file_settings=tuple(settings),
        target=data.get("target"),
    )


def _feature(data: object, path: str, document: Document) -> FeatureUse:
    location = _line(document, path)
    if isinstance(data, str):
        return FeatureUse(name=data, location=location)
    if isinstance(data, Mapping) and len(data) == 1:
        (name, options), *_ = data.items()
        if isinstance(name, str) and isinstance(options, Mapping | None):
            return FeatureUse(name=name, options=options or {}, location=location)
    expected = "`- NAME` or `- NAME: {option: value}`"
    raise ConfigError(Problem(path=path, message="is not a feature", got=show(data), expected=expected))


def _line(document: Document, path: str) -> str:
    return document.locate(Problem(path=path, message="")).location or document.source


def write(config: Node[Any], names: Names) -> str:
    """A config as the text of a file that `read` takes back.

    Raises:
        RequestError: a node in it is not registered as a component, or holds a value that is not plain.
    """
    return dump({"resolved": True, **encode(config, names)})


def with_file(request: Request, names: Names) -> Request:
    """With what the file says, and the files that it stands on."""
    if isinstance(request.experiment, Node) or not is_file(request.experiment):
        return request
    file = _read_chain(str(request.experiment), names)
    both = {
        "features": file.features + request.features,
        "without": file.without + request.without,
        "file_settings": file.file_settings + request.file_settings,
    }
    target = request.target or file.target
    return attrs.evolve(file, **both, settings=request.settings, target=target, layout=request.layout)


def _read_chain(name: str, names: Names, visited: tuple[str, ...] = ()) -> Request:
    """A run file over the one that it stands on, whose options and values it may override; or over the config of a run."""
    if name in visited:
        raise RequestError(f"run files that begin with one another: {' -> '.join((*visited, name))}")
    file = read(name, names)
    if isinstance(file.experiment, Node) or not is_file(file.experiment):
        return file
    base = _read_chain(str(file.experiment), names, (*visited, name))
    return attrs.evolve(
        base,
        features=_overridden(base.features, file.features),
        without=(*base.without, *file.without),
        base_settings=(*base.base_settings, base.file_settings),
        file_settings=file.file_settings,
        target=file.target or base.target,
    )


def _overridden(base: Sequence[FeatureUse], over: Sequence[FeatureUse]) -> tuple[FeatureUse, ...]:
    """The uses of two files, where the second stands on the first: its options hold, the first's others stay."""
    later = {use.name: use for use in over}
    remaining = [
        attrs.evolve(use, options={**use.options, **later[use.name].options}) if use.name in later else use
        for use in base
    ]
    changed = [use.name for use in base]
    return (*remaining, *(attrs.evolve(use, options={}) if use.name in changed else use for use in over))
