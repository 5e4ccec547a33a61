"""From a request to a config, with who set what.

The order: the experiment; the features, sorted by (stage, name); the features of the target's mesh rule; what the run
file sets; what the command line sets. The tree is compared before and after each step, so nodes know nothing of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import ABSENT, Change, Decoder, Node, check, diff, flatten, get, patch
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.tree import matches
from axlearn_core.config.types import show
from axlearn_core.contracts.mesh import Mesh, MeshRule
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import AxlearnError, ConfigError, PluginError, Problem, RequestError
from axlearn_core.plugins.feature import STAGES, Feature
from axlearn_core.plugins.registry import Entry, Registry, registry
from axlearn_core.plugins.request import FeatureUse, Request, Setting, is_file, parse_feature, read, write
from axlearn_core.plugins.targets import find_machine, find_rule, load


@attrs.frozen
class Step:
    """One change of one path: who made it, and the values before and after (`ABSENT` where there was none)."""

    who: str
    old: Any
    new: Any


@attrs.frozen(kw_only=True)
class Resolved:
    """A config, and where each of its values came from.

    Attributes:
        config: the tree; `REQUIRED` fields may still be unset (see `checked`).
        provenance: path (as `flatten` gives them) -> its steps, first to last; paths that were removed are kept.
        title: the name of the experiment or file.
        features: the features that were applied, in that order, with their options.
        machine: the hardware that was asked for.
        rule: who says how to lay it out there.
        notes: for people, what of the mesh rule does not fit this config and was left out.
    """

    config: Node[Any]
    provenance: Mapping[str, tuple[Step, ...]]
    title: str
    features: tuple[tuple[str, Feature], ...] = ()
    machine: Machine | None = None
    rule: str | None = None
    notes: tuple[str, ...] = ()
    names: Registry = attrs.field(repr=False)

    def checked(self) -> "Resolved":
        """Itself, when nothing is missing and all values fit together; raises `ConfigError` with every problem."""
        try:
            check(self.config)
        except ConfigError as error:
            raise ConfigError(attrs.evolve(p, where=p.where or self.setter(p.path)) for p in error.problems) from None
        return self

    def setter(self, path: str) -> str | None:
        """Who set a path last; None where it is as the experiment has it."""
        steps = self.provenance.get(path)
        return f"set by {steps[-1].who}" if steps and len(steps) > 1 else None

    def explain(self, path: str) -> dict[str, tuple[Step, ...]]:
        """The steps of a path; for a node, of everything below it. Raises `ConfigError` with the nearest names."""
        found = {p: s for p, s in self.provenance.items() if not path or p == path or p.startswith(f"{path}.")}
        if not found:
            get(self.config, path)
            inside = [p for p in self.provenance if path.startswith(f"{p}.")]  # an item of a tuple or mapping
            if not inside:
                raise ConfigError(
                    Problem(path=path, message="is passed by the parent when it is built; nobody sets it")
                )
            found = {p: self.provenance[p] for p in inside}
        return found

    def to_yaml(self) -> str:
        """The config as the text of a file that `resolve` takes back."""
        return write(self.config, self.names)


def resolve(
    request: Request | str | Path | Node[Any],
    *,
    names: Registry | None = None,
    **options: Any,
) -> Resolved:
    """The config that a request stands for.

    Args:
        request: a `Request`, or the experiment with `options` of `Request.of`:
            `resolve("quickstart", with_=["rope:theta=500000"], set={"max_steps": 20})`.
        names: what is installed; by default `registry()`.

    Raises:
        RequestError: an unknown name, a path that matches nothing, a value that does not fit, features that conflict.
    """
    names = names or registry()
    if not isinstance(request, Request):
        request = Request.of(request, **options)
    elif options:
        raise TypeError(f"a Request takes no further options: {', '.join(options)}")
    return _Resolution(_with_file(request, names), names).run()


def _with_file(request: Request, names: Registry, seen: tuple[str, ...] = ()) -> Request:
    """With what the file says, and the file that it begins with: a run file may stand on the config of a run."""
    if isinstance(request.experiment, Node) or not is_file(request.experiment):
        return request
    if (name := str(request.experiment)) in seen:
        raise RequestError(f"run files that begin with one another: {' -> '.join((*seen, name))}")
    file = read(name, names)
    both = {k: getattr(file, k) + getattr(request, k) for k in ("features", "without", "file_settings")}
    made = attrs.evolve(file, **both, settings=request.settings, target=request.target or file.target)
    return _with_file(made, names, (*seen, name))


class _Resolution:
    """The state of one call of `resolve`."""

    def __init__(self, request: Request, names: Registry):
        self.request, self.names = request, names
        self.decoder = Decoder(names)
        self.provenance: dict[str, tuple[Step, ...]] = {}
        self.applied: list[tuple[str, Feature]] = []
        self.notes: list[str] = []

    def run(self) -> Resolved:
        request = self.request
        tree = self._experiment()
        machine = find_machine(request.target) if request.target else None
        who, rule = self._rule(tree, machine) if machine else (None, None)
        asked, of_rule = self._selected(
            [attrs.evolve(parse_feature(f), where=str(who)) for f in rule.features] if rule else []
        )
        made = {use.name: self._made(use) for use in asked}
        _check_needs(made, {u.name: u.where for u in asked})
        tree = self._features(tree, made)
        if machine and rule:
            for use in sorted(of_rule, key=self._stage):
                tree = self._optional(tree, use)
            tree = self._laid_out(tree, rule, machine, str(who))
        for settings in (request.file_settings, request.settings):
            tree = self._settings(tree, settings)
        title = request.title or (request.experiment if isinstance(request.experiment, str) else "config")
        return Resolved(
            config=tree,
            provenance=self.provenance,
            title=title,
            features=tuple(self.applied),
            machine=machine,
            rule=who,
            notes=tuple(self.notes),
            names=self.names,
        )

    def _rule(self, tree: Node[Any], machine: Machine) -> tuple[str | None, MeshRule | None]:
        """The mesh rule that holds, and who says so."""

        def count() -> int:  # of the model as the user asks for it
            asked = {use.name for use in self.request.features}
            own = tuple(n for n in self.request.without if n in asked)
            trial = attrs.evolve(self.request, target=None, without=own)
            try:
                config = _Resolution(trial, self.names).run().config
            except ConfigError:
                # A setting may be of what the rule brings; a wrong one is reported with the rule in place.
                bare = attrs.evolve(trial, settings=(), file_settings=())
                config = _Resolution(bare, self.names).run().config
            counted: Any = load("axlearn_core.compose.functional:count_parameters")  # imports JAX: only where asked for
            return counted(getattr(config, "model", config))

        mesh = getattr(tree, "mesh", None)
        return find_rule(machine, mesh.targets if isinstance(mesh, Mesh) else {}, count) or (None, None)

    def _stage(self, use: FeatureUse) -> tuple[int, str]:
        known = use.name in self.names.claims["features"]
        return (STAGES.index(self.names.feature(use.name).stage) if known else 0), use.name

    def _optional(self, tree: Node[Any], use: FeatureUse) -> Node[Any]:
        """A feature of the mesh rule; rules are for all models, so one that does not fit is left out, with a note."""
        try:
            made = {use.name: self._made(use)}
            _check_needs({**dict(self.applied), **made}, dict.fromkeys((*dict(self.applied), use.name), use.where))
            return self._features(tree, made)
        except PluginError:
            raise
        except RequestError as error:
            reason = str(error).splitlines()[0].rstrip(":")
            self.notes.append(f"{use.where}: the feature {use.name!r} is left out: {reason}")
            return tree

    def _laid_out(self, tree: Node[Any], rule: MeshRule, machine: Machine, who: str) -> Node[Any]:
        mesh = getattr(tree, "mesh", None)
        if not isinstance(mesh, Mesh) or not (rule.shape or rule.rules):
            return tree
        edits = {"mesh.rules": {**mesh.rules, **rule.rules}, "mesh.shape": rule.sizes(machine) or dict(mesh.shape)}
        after = patch(tree, edits, self.decoder.decode_at)
        self.record(diff(tree, after, self.names.shown_name), who)
        return after

    def record(self, changes: Iterable[Change], who: str) -> None:
        for change in changes:
            step = Step(who, change.old, change.new)
            self.provenance[change.path] = (*self.provenance.get(change.path, ()), step)

    def _experiment(self) -> Node[Any]:
        given = self.request.experiment
        if isinstance(given, Node):
            document = self.request.document
            for path, value in flatten(given, self.names.shown_name).items():
                line = document.lines.get(path) if document else None
                who = f"{document.source}:{line}" if document and line else "the default" if document else "given"
                self.record([Change(path, ABSENT, value)], who)
            return given
        entry = self.names.entry("experiments", str(given))
        tree = self.names.experiment(str(given))
        who = f"experiment {entry.name} ({entry.origin})"
        self.record((Change(path, ABSENT, value) for path, value in flatten(tree, self.names.shown_name).items()), who)
        return tree

    def _selected(self, rule_features: Sequence[FeatureUse]) -> tuple[list[FeatureUse], list[FeatureUse]]:
        """What the user asks for and what the mesh rule adds, each once, without what is to be left out.

        A feature that the user asks for is as the user says, whatever options the rule has for it.
        """
        asked: dict[str, FeatureUse] = {}
        for use in self.request.features:
            asked[use.name] = _merged(asked[use.name], use) if use.name in asked else use
        of_rule = {use.name: use for use in rule_features}
        for name in self.request.without:
            if name not in asked and name not in of_rule:
                known = {*asked, *of_rule}
                hint = f"\n    asked for: {', '.join(sorted(known))}" if known else "; no feature is asked for"
                raise RequestError(f"--without {name}: that feature is not asked for{hint}")
        left_out = set(self.request.without)
        mine = [u for u in asked.values() if u.name not in left_out]
        return mine, [u for u in of_rule.values() if u.name not in {*left_out, *asked}]

    def _made(self, use: FeatureUse) -> Feature:
        """The feature with its options."""
        try:
            cls = self.names.feature(use.name)
        except PluginError:
            raise
        except RequestError as error:
            raise RequestError(f"{use.where}: {error}") from None
        try:
            return check(self.decoder.decode_at(cls(), "", use.options))
        except ConfigError as error:
            fix = f"`axlearn features show {use.name}` prints its options"
            raise ConfigError(
                attrs.evolve(p, path=f"{use.name}.{p.path}", where=use.where, fix=fix) for p in error.problems
            ) from None

    def _features(self, tree: Node[Any], made: Mapping[str, Feature]) -> Node[Any]:
        changed: dict[tuple[str, str], tuple[Entry, Change]] = {}
        for name, feature in sorted(made.items(), key=lambda f: (STAGES.index(f[1].stage), f[0])):
            entry = self.names.entry("features", name)
            before, tree = tree, _applied(tree, feature, entry)
            changes = diff(before, tree, self.names.shown_name)
            if not changes and not feature.in_effect(tree):
                raise RequestError(
                    f"the feature {name!r} ({entry.origin}) changes nothing in this config: nothing in it matches, or "
                    f"all is as it would have it\n    fix: leave it out; see `axlearn features show {name}`"
                )
            if feature.stage == "execute":
                _check_execution(changes, before, tree, entry)
            for change in changes:
                if (key := (feature.stage, change.path)) in changed:
                    raise _conflict((entry, change), changed[key], feature.stage)
                changed[key] = (entry, change)
            self.record(changes, f"feature {name} ({entry.origin})")
            self.applied.append((name, feature))
        return tree

    def _settings(self, tree: Node[Any], settings: Sequence[Setting]) -> Node[Any]:
        edits: dict[str, Setting] = {}
        for setting in settings:
            first = edits.setdefault(setting.path, setting)
            if first.value != setting.value or type(first.value) is not type(setting.value):
                raise ConfigError(
                    Problem(
                        path=setting.path,
                        message="is set to two values",
                        got=f"{show(first.value)} by {first.where} and {show(setting.value)} by {setting.where}",
                    )
                )
        try:
            after = patch(tree, {path: s.value for path, s in edits.items()}, self.decoder.decode_at)
        except ConfigError as error:
            raise ConfigError(_located(p, settings) for p in error.problems) from None
        changes = {c.path: c for c in diff(tree, after, self.names.shown_name)}
        flat = flatten(after, self.names.shown_name)
        for pattern in edits:
            for path in flat:  # set to what it was: the user still said so
                if path not in changes and matches(pattern, path):
                    changes[path] = Change(path, flat[path], flat[path])
        for change in changes.values():
            self.record([change], _setter(change.path, settings))
        return after


def _merged(first: FeatureUse, second: FeatureUse) -> FeatureUse:
    for key in first.options.keys() & second.options.keys():
        a, b = first.options[key], second.options[key]
        if a != b or type(a) is not type(b):
            raise RequestError(
                f"the feature {first.name!r} gets two values for {key!r}: {show(a)} by {first.where}, "
                f"{show(b)} by {second.where}\n    fix: give one of them"
            )
    where = first.where if second.where == first.where else f"{first.where} and {second.where}"
    return attrs.evolve(first, options={**first.options, **second.options}, where=where)


def _check_needs(made: Mapping[str, Feature], where: Mapping[str, str]) -> None:
    for name, feature in sorted(made.items()):
        for other in feature.needs:
            if other not in made:
                raise RequestError(
                    f"the feature {name!r} ({where[name]}) needs {other!r}\n    fix: add `--with {other}`"
                )
        for other in feature.excludes:
            if other in made:
                raise RequestError(
                    f"the features {name!r} ({where[name]}) and {other!r} ({where[other]}) cannot be used together\n"
                    "    fix: leave one of them out"
                )


def _applied(tree: Node[Any], feature: Feature, entry: Entry) -> Node[Any]:
    try:
        result = feature.apply(tree)
    except PluginError:
        raise
    except AxlearnError as error:
        raise RequestError(f"the feature {entry.name!r} ({entry.origin}) does not fit this config:\n{error}") from error
    except Exception as error:  # a feature is a plugin's code and may raise anything; the cause is chained and shown
        raise entry.failed("failed in apply()", error) from error
    if not isinstance(result, Node):
        raise PluginError(f"apply() of the {entry} returned {type(result).__name__}, not a config node")
    return result


def _check_execution(changes: tuple[Change, ...], before: Node[Any], after: Node[Any], entry: Entry) -> None:
    for change, kind in change_kinds(changes, before, after):
        if kind not in ("execution", "microbatches"):
            raise PluginError(
                f"the feature {entry.name!r} ({entry.origin}) is of the stage 'execute' and changes {change.path}, which is "
                f"{kind}: {change.old!r} -> {change.new!r}\n"
                '    fix: give it another stage, or mark the field with setting(kind="execution") if no result depends on it'
            )


def _conflict(later: tuple[Entry, Change], earlier: tuple[Entry, Change], stage: str) -> RequestError:
    (a, first), (b, second) = earlier, later
    return RequestError(
        f"two features of the stage {stage!r} change {second.path}:\n"
        f"    {a.name} ({a.origin}): {first.old!r} -> {first.new!r}\n"
        f"    {b.name} ({b.origin}): {second.old!r} -> {second.new!r}\n"
        "    fix: leave one of them out"
    )


def _setting_of(path: str, settings: Sequence[Setting]) -> Setting | None:
    """The innermost setting whose pattern fits the path or something above it."""
    parts = path.split(".")
    above = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    fits = [s for p in above for s in settings if matches(s.path, p)]
    return fits[0] if fits else None


def _setter(path: str, settings: Sequence[Setting]) -> str:
    found = _setting_of(path, settings)
    return found.where if found else settings[0].where


def _located(problem: Problem, settings: Sequence[Setting]) -> Problem:
    exact = next((s for s in settings if s.path == problem.path), None)
    found = exact or _setting_of(problem.path, settings)
    return attrs.evolve(problem, where=found.where) if found and not problem.where else problem
