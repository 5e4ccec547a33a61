"""From a request to a config, with who set what.

The order: the experiment; the features, by stage and then as they say (`plugins.order`); the features of the target's
mesh rule; what the run file sets; what the command line sets. The tree is compared before and after each step, so nodes
know nothing of it.

A target that the request names brings its whole mesh rule. A detected machine brings the execution settings of its rule. A rule
of the config itself (`mesh.targets`) is one layout, so a detected machine brings the whole rule or the backend's instead.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import ABSENT, Change, Decoder, Node, check, diff, flatten, get, patch
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.tree import matches
from axlearn_core.config.types import show
from axlearn_core.contracts.experiment import mesh_of, model_of
from axlearn_core.contracts.mesh import MeshRule, TargetRule
from axlearn_core.contracts.request_layout import RequestLayout
from axlearn_core.contracts.target import Detected, Machine
from axlearn_core.errors import AxlearnError, ConfigError, PluginError, Problem, RequestError
from axlearn_core.plugins.decisions import Decision, show_changes
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.indivisible import replace_shape
from axlearn_core.plugins.order import Order
from axlearn_core.plugins.registry import Entry, Registry, registry
from axlearn_core.plugins.request import FeatureUse, Request, Setting, parse_feature, with_file, write
from axlearn_core.plugins.targets import find_machine, find_own_rule, find_rule, load

NO_TARGET = "none"
"""The target of a request that takes no mesh rule."""

Detect = Callable[[Node[Any]], Detected]
"""From the config of a request without a mesh rule to the machine that it is to run on."""


@attrs.frozen
class Step:
    """One change of one path: who made it, and the values before and after (`ABSENT` where there was none)."""

    set_by: str
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
        machine: the hardware that was asked for, or that was detected and has a mesh rule.
        detected: whether the machine was detected, for which JAX has started.
        rule: who says how to lay it out there.
        notes: for people, what of the mesh rule does not fit this config and was left out.
        decisions: the machine, the mesh rule, what it changed and what it left out, and features that changed nothing.
    """

    config: Node[Any]
    provenance: Mapping[str, tuple[Step, ...]]
    title: str
    features: tuple[tuple[str, Feature], ...] = ()
    machine: Machine | None = None
    rule: str | None = None
    notes: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    detected: bool = False
    names: Registry = attrs.field(repr=False)

    def checked(self) -> "Resolved":
        """Itself, when nothing is missing and all values fit together; raises `ConfigError` with every problem."""
        try:
            check(self.config)
        except ConfigError as error:
            raise ConfigError(
                attrs.evolve(p, location=p.location or self.setter(p.path)) for p in error.problems
            ) from None
        return self

    def setter(self, path: str) -> str | None:
        """Who set a path last; None where it is as the experiment has it."""
        steps = self.provenance.get(path)
        return f"set by {steps[-1].set_by}" if steps and len(steps) > 1 else None

    def explain(self, path: str) -> dict[str, tuple[Step, ...]]:
        """The steps of a path; for a node, of everything below it. Raises `ConfigError` with the nearest names."""
        steps = {p: s for p, s in self.provenance.items() if not path or p == path or p.startswith(f"{path}.")}
        if not steps:
            get(self.config, path)
            inside = [p for p in self.provenance if path.startswith(f"{p}.")]  # an item of a tuple or mapping
            if not inside:
                message = "is at its default, or passed by the parent when it is built: nobody set it"
                raise ConfigError(Problem(path=path, message=message))
            steps = {p: self.provenance[p] for p in inside}
        return steps

    def to_yaml(self) -> str:
        """The config as the text of a file that `resolve` takes back."""
        return write(self.config, self.names)


def resolve(
    request: Request | str | Path | Node[Any],
    *,
    names: Registry | None = None,
    detect: Detect | None = None,
    **options: Any,
) -> Resolved:
    """The config that a request stands for.

    Args:
        request: a `Request`, or the experiment with `options` of `Request.of`:
            `resolve("quickstart", with_=["rope:theta=500000"], set={"max_steps": 20})`.
        names: what is installed; by default `registry()`.
        detect: finds the machine for a request without a target, given its config without a mesh rule.

    Raises:
        RequestError: an unknown name, a path that matches nothing, a value that does not fit, features that conflict, a
            feature of the mesh rule that is not installed.
    """
    names = names or registry()
    if not isinstance(request, Request):
        request = Request.of(request, **options)
    elif options:
        raise TypeError(f"a Request takes no further options: {', '.join(options)}")
    request = with_file(request, names)
    start = _Start.of(request, names)
    if request.layout is None:
        return _resolve_from(start, request, names, detect)
    layout: RequestLayout = names.entry("functions", "read_layout").load()(request.layout)
    laid = layout.apply(request)
    resolved = _resolve_from(start, laid, names)
    without = attrs.evolve(request, layout=None, target=laid.target)
    layout.check(_resolve_from(start, without, names).config, resolved.config)
    return resolved


def _resolve_from(start: "_Start", request: Request, names: Registry, detect: Detect | None = None) -> Resolved:
    return _Resolution(start, request, names, _RuleChooser(start, request, names, detect).choose()).run()


@attrs.frozen
class _Start:
    """The experiment of a request, and who set what of it. Every pass over the request begins with it."""

    tree: Node[Any]
    provenance: Mapping[str, tuple[Step, ...]]

    @classmethod
    def of(cls, request: Request, names: Registry) -> "_Start":
        if isinstance(request.experiment, Node):
            tree, document = request.experiment, request.document
            lines, setter = (document.lines, "the default") if document else ({}, "given")
        else:
            entry = names.entry("experiments", str(request.experiment))
            tree, document = names.experiment(entry.name), None
            lines, setter = {}, f"experiment {entry.name} ({entry.origin})"
        provenance = {}
        for path, value in flatten(tree, names.shown_name).items():
            line = lines.get(path)
            provenance[path] = (Step(f"{document.source}:{line}" if document and line else setter, ABSENT, value),)
        return cls(tree, provenance)


@attrs.frozen(kw_only=True)
class _RuleChoice:
    """The machine and the mesh rule of a request.

    Attributes:
        machine: None if no mesh rule is applied, or if no package knows the machine.
        rule_title: the rule and where it comes from, for people.
        rule: its shape, its rules and its features.
        indivisible: the rule of the machine that has a shape for parameters that cannot be split, even if it is not applied.
        decisions: how the choice was made.
        detected: whether the machine was to be detected.
    """

    machine: Machine | None = None
    rule_title: str | None = None
    rule: MeshRule | None = None
    indivisible: tuple[str, MeshRule, Machine] | None = None
    decisions: tuple[Decision, ...] = ()
    detected: bool = False


class _RuleChooser:
    """Chooses the machine and the mesh rule of a request."""

    def __init__(self, start: _Start, request: Request, names: Registry, detect: Detect | None):
        self.start, self.request, self.names, self.detect = start, request, names, detect
        self.decisions: list[Decision] = []
        self.indivisible: tuple[str, MeshRule, Machine] | None = None

    def choose(self) -> _RuleChoice:
        """The machine to run on, its mesh rule, and who says so."""
        machine, rule_title, rule = self._machine_and_rule()
        return _RuleChoice(
            machine=machine,
            rule_title=rule_title,
            rule=rule,
            indivisible=self.indivisible,
            decisions=tuple(self.decisions),
            detected=self.request.target is None and self.detect is not None,
        )

    @functools.cached_property
    def without_rule(self) -> Resolved:
        """The request without a mesh rule."""
        return _resolve_from(self.start, self.request.without_rule(), self.names)

    def _machine_and_rule(self) -> tuple[Machine | None, str | None, MeshRule | None]:
        target = self.request.target
        if target == NO_TARGET:
            self._decide("mesh rule", "none", "--target none")
        if target == NO_TARGET or (target is None and self.detect is None):
            return None, None, None
        if target is not None:
            machine = find_machine(target)
            self._decide("machine", machine.name, f"--target {target}")
        else:
            assert self.detect is not None
            # A wrong config is an error before JAX starts and waits for other processes.
            detected = self.detect(self.without_rule.checked().config)
            machine = detected.machine
            if machine is None:
                self._decide("machine", detected.description, "no installed package knows it: no mesh rule")
                return None, None, None
            self._decide("machine", f"{machine.name}, {detected.description}")
        own = self._own_rules()
        refused = None if target or self.request.document else self._refused_own_rule(machine, own)
        if refused:
            self._decide("left out", *refused)
        rule_title, rule = find_rule(machine, {} if refused else own, self._count_parameters) or (None, None)
        if rule is not None and rule.indivisible:
            self.indivisible = str(rule_title), rule, machine
        if rule is not None and self.request.target is None and (rule.detected is False or self.request.document):
            whole = "the request is a whole config; " if self.request.document else ""
            named = refused[0] if refused else str(rule_title).removeprefix("mesh rule ")
            self._decide("mesh rule", "none", f"{whole}--target {machine.name} brings {named}")
            return None, None, None
        if rule is None:
            self._decide("mesh rule", "none", f"no installed package has one for {machine.name}")
            return (machine if target else None), None, None
        self._decide("mesh rule", str(rule_title).removeprefix("mesh rule "))
        return machine, rule_title, rule

    def _refused_own_rule(self, machine: Machine, own: Mapping[str, TargetRule]) -> tuple[str, str] | None:
        """The config's own rule and the reason not to apply it on a detected machine; None where it applies or there is none."""
        own_rule = find_own_rule(machine, own)
        if own_rule is None:
            return None
        mesh, rule = mesh_of(self.start.tree), own_rule[1]
        if mesh is not None and mesh.shape and (rule.shape or rule.rules):
            return own_rule[0], f"the config has the mesh {dict(mesh.shape)}; --target {machine.name} brings the rule"
        before = self.without_rule.config
        after = _resolve_from(self.start, attrs.evolve(self.request, target=machine.name), self.names).config
        kinds = change_kinds(diff(before, after, self.names.shown_name), before, after)
        decisive = [change for change, kind in kinds if kind != "execution"]
        if not decisive:
            return None
        return own_rule[0], f"changes more than execution: {show_changes(decisive)}; --target {machine.name} brings it"

    def _own_rules(self) -> Mapping[str, TargetRule]:
        """The rules of the config itself: the experiment's, with what the request sets of them."""
        tree = self.start.tree
        leaves = [p.split(".") for p in flatten(tree, self.names.shown_name) if p.startswith("mesh.targets")]
        existing = {".".join(parts[: i + 1]) for parts in leaves for i in range(len(parts))}
        for settings in self.request.settings_of("mesh.targets", existing):
            tree = _set_values(tree, settings, self.names, Decoder(self.names))[0]
        mesh = mesh_of(tree)
        return {} if mesh is None else mesh.targets

    def _count_parameters(self) -> int:
        try:
            config = self.without_rule.config
        except ConfigError:
            # A setting may be of what the rule brings; a wrong one is reported with the rule in place.
            no_settings: Any = {"settings": (), "file_settings": (), "base_settings": ()}
            trial = attrs.evolve(self.request.without_rule(), **no_settings)
            config = _resolve_from(self.start, trial, self.names).config
        counted: Any = load("axlearn_core.compose.functional:count_parameters")  # imports JAX: only if it is asked for
        return counted(model_of(config) or config)

    def _decide(self, kind: Any, subject: str, reason: str = "") -> None:
        self.decisions.append(Decision(kind, subject, reason))


class _Resolution:
    """One pass over a request: the changes to its experiment, in order, and the record of them."""

    def __init__(self, start: _Start, request: Request, names: Registry, choice: _RuleChoice):
        self.start, self.request, self.names, self.choice = start, request, names, choice
        self.decoder = Decoder(names)
        self.provenance = dict(start.provenance)
        self.applied: list[tuple[str, Feature]] = []
        self.notes: list[str] = []
        self.decisions = list(choice.decisions)

    def run(self) -> Resolved:
        request, choice = self.request, self.choice
        machine, rule, rule_title = choice.machine, choice.rule, choice.rule_title
        tree = self.start.tree
        uses, of_rule = self._select_features(
            [attrs.evolve(parse_feature(f), location=str(rule_title)) for f in rule.features] if rule else []
        )
        features = {use.name: self._build_feature(use) for use in uses}
        _check_needs(features, {u.name: u.location for u in uses})
        tree = self._features(tree, features)
        if machine and rule:
            self._check_installed(of_rule, rule, str(rule_title))
            by_name = {use.name: use for use in of_rule}
            for name in Order.of({n: self.names.feature(n) for n in by_name}, self.names).names:
                tree = self._optional(tree, by_name[name], machine)
            tree = self._laid_out(tree, rule, machine, str(rule_title))
        for settings in (*request.base_settings, request.file_settings, request.settings):
            tree = self._settings(tree, settings)
        replacement = replace_shape(tree, *choice.indivisible[1:]) if choice.indivisible else None
        if choice.indivisible and replacement:
            before, tree = tree, patch(tree, {"mesh.shape": replacement.shape}, self.decoder.decode_at)
            self.record(diff(before, tree, self.names.shown_name), choice.indivisible[0])
            self._decide("applied", "mesh", replacement.reason)
        title = request.title or (request.experiment if isinstance(request.experiment, str) else "config")
        return Resolved(
            config=tree,
            provenance=self.provenance,
            title=title,
            features=tuple(self.applied),
            machine=machine,
            rule=rule_title,
            notes=tuple(self.notes),
            decisions=tuple(self.decisions),
            detected=choice.detected,
            names=self.names,
        )

    def _decide(self, kind: Any, subject: str, reason: str = "") -> None:
        self.decisions.append(Decision(kind, subject, reason))

    def _check_installed(self, uses: Iterable[FeatureUse], rule: MeshRule, rule_title: str) -> None:
        """Raises `RequestError` for features of the mesh rule that are not installed."""
        missing = [use.name for use in uses if use.name not in self.names.claims["features"]]
        if not missing:
            return
        for name in {entry.name for entry in self.names.blocked if entry.group == "features"} & {*missing}:
            self.names.entry("features", name)  # raises: it is installed, and blocked
        packages = sorted({rule.packages[n] for n in missing if n in rule.packages})
        install = f"pip install {' '.join(packages)}" if packages else "install the package that has it"
        without = " ".join(f"--without {n}" for n in missing)
        raise RequestError(
            f"{rule_title} applies {', '.join(map(repr, missing))}, which {'is' if len(missing) == 1 else 'are'} not installed\n"
            f"    fix: {install}; or leave it out: {without}; or take no mesh rule: --target {NO_TARGET}"
        )

    def _optional(self, tree: Node[Any], use: FeatureUse, machine: Machine) -> Node[Any]:
        """A feature of the mesh rule; rules are for all models, so one that does not fit is left out, with a note."""
        try:
            features = {use.name: self._build_feature(use)}
            _check_needs(
                {**dict(self.applied), **features}, dict.fromkeys((*dict(self.applied), use.name), use.location)
            )
            after = _applied(tree, features[use.name], self.names.entry("features", use.name))
            changes = diff(tree, after, self.names.shown_name)
            kinds = change_kinds(changes, tree, after)
            decisive = [change for change, kind in kinds if kind != "execution"]
            if decisive and self.request.target is None:
                options = f"--with {use.text} or --target {machine.name} brings it"
                self._decide("left out", use.text, f"changes more than execution: {show_changes(decisive)}; {options}")
                return tree
            tree = self._features(tree, features)
        except PluginError:
            raise
        except RequestError as error:
            reason = str(error).splitlines()[0].rstrip(":")
            self.notes.append(f"{use.location}: the feature {use.name!r} is left out: {reason}")
            self._decide("left out", use.text, reason)
            return tree
        self._decide("applied", use.text, show_changes(changes) or "the config has it already")
        return tree

    def _laid_out(self, tree: Node[Any], rule: MeshRule, machine: Machine, rule_title: str) -> Node[Any]:
        mesh = mesh_of(tree)
        if mesh is None or not (rule.shape or rule.rules):
            return tree
        if self.request.target is None and mesh.shape:
            self._decide("left out", "mesh.shape, mesh.rules", f"the config has the mesh {dict(mesh.shape)}")
            return tree
        edits = {"mesh.rules": {**mesh.rules, **rule.rules}, "mesh.shape": rule.sizes(machine) or dict(mesh.shape)}
        after = patch(tree, edits, self.decoder.decode_at)
        changes = diff(tree, after, self.names.shown_name)
        self.record(changes, rule_title)
        if changes:
            self._decide("applied", "mesh", show_changes([c for c in changes if c.new is not ABSENT], limit=4))
        return after

    def record(self, changes: Iterable[Change], set_by: str) -> None:
        for change in changes:
            step = Step(set_by, change.old, change.new)
            self.provenance[change.path] = (*self.provenance.get(change.path, ()), step)

    def _select_features(self, rule_features: Sequence[FeatureUse]) -> tuple[list[FeatureUse], list[FeatureUse]]:
        """What the user asks for and what the mesh rule adds, each once, without what is to be left out.

        The user's options of a feature win over the rule's.
        """
        uses: dict[str, FeatureUse] = {}
        for use in self.request.features:
            uses[use.name] = _merged(uses[use.name], use) if use.name in uses else use
        of_rule = {use.name: use for use in rule_features}
        for name in self.request.without:
            if name not in uses and name not in of_rule:
                names = {*uses, *of_rule}
                hint = f"\n    asked for: {', '.join(sorted(names))}" if names else "; no feature is asked for"
                raise RequestError(f"--without {name}: that feature is not asked for{hint}")
        left_out = set(self.request.without)
        for use in of_rule.values():
            if use.name in {*left_out, *uses}:
                self._decide(
                    "left out", use.text, f"--without {use.name}" if use.name in left_out else "as you ask for it"
                )
        own = [u for u in uses.values() if u.name not in left_out]
        return own, [u for u in of_rule.values() if u.name not in {*left_out, *uses}]

    def _build_feature(self, use: FeatureUse) -> Feature:
        """The feature with its options."""
        try:
            cls = self.names.feature(use.name)
        except PluginError:
            raise
        except RequestError as error:
            raise RequestError(f"{use.location}: {error}") from None
        try:
            return check(self.decoder.decode_at(cls(), "", use.options))
        except ConfigError as error:
            at, fix = use.location, f"`axlearn features show {use.name}` prints its options"
            raise ConfigError(
                attrs.evolve(p, path=f"{use.name}.{p.path}", location=at, fix=p.fix or fix) for p in error.problems
            ) from None

    def _features(self, tree: Node[Any], features: Mapping[str, Feature]) -> Node[Any]:
        changed: dict[tuple[str, str], list[tuple[Entry, Change]]] = {}
        order = Order.of(features, self.names)
        for name in order.names:
            feature = features[name]
            entry = self.names.entry("features", name)
            before, tree = tree, _applied(tree, feature, entry)
            changes = diff(before, tree, self.names.shown_name)
            if not changes and not feature.in_effect(tree):
                raise RequestError(
                    f"the feature {name!r} ({entry.origin}) changes nothing in this config: nothing in it matches, or "
                    f"the config is already as it asks\n    fix: leave it out; see `axlearn features show {name}`"
                )
            if not changes and any(use.name == name for use in self.request.features):
                self._decide("unchanged", f"the feature {name!r}", "the config is already as it asks")
            if feature.stage == "execute":
                _check_execution(changes, before, tree, entry)
            for change in changes:
                earlier = changed.setdefault((feature.stage, change.path), [])
                for other in earlier:
                    if other[0].name not in order.below[name]:
                        raise _conflict((entry, change), other, feature.stage)
                earlier.append((entry, change))
            self.record(changes, f"feature {name} ({entry.origin})")
            self.applied.append((name, feature))
        return tree

    def _settings(self, tree: Node[Any], settings: Sequence[Setting]) -> Node[Any]:
        after, changes = _set_values(tree, settings, self.names, self.decoder)
        for change in changes:
            self.record([change], _setter(change.path, settings))
        return after


def _set_values(
    tree: Node[Any], settings: Sequence[Setting], names: Registry, decoder: Decoder
) -> tuple[Node[Any], list[Change]]:
    """Sets what the settings say.

    Returns:
        The tree, and the changes; a value that was set to what it was is one of them, since somebody said so.

    Raises:
        ConfigError: a path gets two values, matches nothing, or its value does not fit.
    """
    edits: dict[str, Setting] = {}
    for setting in settings:
        first = edits.setdefault(setting.path, setting)
        if first.value != setting.value or type(first.value) is not type(setting.value):
            raise ConfigError(
                Problem(
                    path=setting.path,
                    message="is set to two values",
                    got=f"{show(first.value)} by {first.location} and {show(setting.value)} by {setting.location}",
                )
            )
    try:
        after = patch(tree, {path: s.value for path, s in edits.items()}, decoder.decode_at)
    except ConfigError as error:
        paths = {s.path: s for s in reversed(settings)}
        raise ConfigError(_locate_problem(p, settings, paths) for p in error.problems) from None
    changes = {c.path: c for c in diff(tree, after, names.shown_name)}
    flat = flatten(after, names.shown_name)
    for pattern in edits:
        for path in flat:
            if path not in changes and matches(pattern, path):
                changes[path] = Change(path, flat[path], flat[path])
    return after, list(changes.values())


def _setting_of(path: str, settings: Sequence[Setting]) -> Setting | None:
    """The innermost setting whose pattern fits the path or something above it."""
    parts = path.split(".")
    above = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    fits = [s for p in above for s in settings if matches(s.path, p)]
    return fits[0] if fits else None


def _setter(path: str, settings: Sequence[Setting]) -> str:
    setting = _setting_of(path, settings)
    return setting.location if setting else settings[0].location


def _locate_problem(problem: Problem, settings: Sequence[Setting], paths: Mapping[str, Setting]) -> Problem:
    source = paths.get(problem.path) or _setting_of(problem.path, settings)
    return attrs.evolve(problem, location=source.location) if source and not problem.location else problem


def _merged(first: FeatureUse, second: FeatureUse) -> FeatureUse:
    """Merges two uses of one feature. Raises `RequestError` if they give one option two values."""
    for key in first.options.keys() & second.options.keys():
        a, b = first.options[key], second.options[key]
        if a != b or type(a) is not type(b):
            raise RequestError(
                f"the feature {first.name!r} gets two values for {key!r}: {show(a)} by {first.location}, "
                f"{show(b)} by {second.location}\n    fix: give one of them"
            )
    location = first.location if second.location == first.location else f"{first.location} and {second.location}"
    return attrs.evolve(first, options={**first.options, **second.options}, location=location)


def _check_needs(features: Mapping[str, Feature], locations: Mapping[str, str]) -> None:
    """Raises `RequestError` if a feature that another one needs is missing, or two features exclude each other."""
    for name, feature in sorted(features.items()):
        for other in feature.needs:
            if other not in features:
                raise RequestError(
                    f"the feature {name!r} ({locations[name]}) needs {other!r}\n    fix: add `--with {other}`"
                )
        for other in feature.excludes:
            if other in features:
                raise RequestError(
                    f"the features {name!r} ({locations[name]}) and {other!r} ({locations[other]}) cannot be used together\n"
                    "    fix: leave one of them out"
                )


def _applied(tree: Node[Any], feature: Feature, entry: Entry) -> Node[Any]:
    """Applies a feature. Raises `RequestError` if it does not fit, `PluginError` if it fails."""
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
    """Raises `PluginError` if a feature of the stage `execute` changes more than how a program runs."""
    for change, kind in change_kinds(changes, before, after):
        if kind not in ("execution", "microbatches"):
            raise PluginError(
                f"the feature {entry.name!r} ({entry.origin}) is of the stage 'execute' and changes {change.path}, which is "
                f"{kind}: {change.old!r} -> {change.new!r}\n"
                '    fix: give it another stage, or mark the field with setting(kind="execution") if no result depends on it'
            )


def _conflict(later: tuple[Entry, Change], earlier: tuple[Entry, Change], stage: str) -> RequestError:
    """The error for two features of one stage, without a stated order, that change one path."""
    (a, first), (b, second) = earlier, later
    return RequestError(
        f"two features of the stage {stage!r} change {second.path}:\n"
        f"    {a.name} ({a.origin}): {first.old!r} -> {first.new!r}\n"
        f"    {b.name} ({b.origin}): {second.old!r} -> {second.new!r}\n"
        "    fix: leave one of them out"
    )
