"""Resolve a request to a config, and record the source of every value.

The steps are: the experiment, the requested features (see `plugins.order`), the features of the target's mesh rule, the
settings in the run file, the settings on the command line, and a replacement for a default mesh that cannot shard the
parameters. The tree is compared before and after each step, so nodes need not track changes.

If the request names a target, its whole mesh rule is applied. On a detected machine, only the execution settings of a
plugin's rule are applied. On such a machine, a rule in the config (`mesh.targets`) is applied completely or not at
all; in the latter case, a plugin's rule is used.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import ABSENT, Change, Decoder, Node, check, diff, flatten, get, patch
from axlearn_core.config.display import config_html
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.tree import join, locate
from axlearn_core.contracts.experiment import get_experiment_name, get_mesh, get_model_config
from axlearn_core.contracts.mesh import MeshRule, TargetRule
from axlearn_core.contracts.request_layout import RequestLayout
from axlearn_core.contracts.target import DetectedMachine, Machine
from axlearn_core.errors import AxlearnError, ConfigError, PluginError, Problem, RequestError
from axlearn_core.plugins.apply_settings import SettingIndex, apply_settings, describe_replaced
from axlearn_core.plugins.backends import prepare_backends
from axlearn_core.plugins.decisions import Decision, show_changes
from axlearn_core.plugins.feature import Feature
from axlearn_core.plugins.lost_settings import (
    check_not_hidden,
    describe_lost,
    describe_lost_to_settings,
    filter_decisions,
)
from axlearn_core.plugins.mesh_replacement import find_mesh_replacement
from axlearn_core.plugins.order import Order, check_needs
from axlearn_core.plugins.registry import Entry, Registry, registry
from axlearn_core.plugins.request import FeatureUse, Request, Setting, merge_file, merge_uses, parse_feature, write
from axlearn_core.plugins.targets import find_config_rule, find_machine, find_rule, load

UNNAMED = "config"
"""Title of a config without a name. Earlier versions gave it to every config object."""
NO_TARGET = "none"
"""Target of a request that applies no mesh rule."""

Detect = Callable[[Node[Any]], DetectedMachine]
"""Function that detects the machine, given the config resolved without a mesh rule."""


@attrs.frozen
class Step:
    """A change to one value.

    Attributes:
        source: Source of the change.
        old: Previous value, or `ABSENT`.
        new: New value, or `ABSENT`.
    """

    source: str
    old: Any
    new: Any


@attrs.frozen(kw_only=True, repr=False)
class Resolved:
    """A config with the source of each of its values.

    Attributes:
        config: Config tree. `REQUIRED` fields may still be unset (see `check`).
        provenance: Steps of each path, first to last. Paths are as in `flatten`, and include removed paths.
        title: Name of the experiment or file.
        features: Applied features with their options, in order of application.
        machine: Requested hardware, or detected hardware that has a mesh rule.
        detected: True if the machine was detected, which initializes JAX.
        rule: Title of the mesh rule.
        notes: Messages about parts of the mesh rule that do not fit this config and were skipped.
        decisions: Decisions about the machine, the mesh rule, unchanged features, and replaced settings.
        names: Registry that resolved the request.
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
    names: Registry

    def __repr__(self) -> str:
        features = [f"with {name}" for name, _ in self.features]
        machine = [f"for {self.machine.name}"] if self.machine else []
        return f"Resolved({', '.join([self.title, *features, *machine])})"

    def _repr_html_(self) -> str:
        """Return the config as collapsible nested lists, for notebooks."""
        return config_html(self.config)

    def check(self) -> "Resolved":
        """Check the config and return `self`. Raise `ConfigError` if values are missing or inconsistent."""
        try:
            check(self.config)
        except ConfigError as error:
            raise ConfigError(
                attrs.evolve(p, location=p.location or self.setter(p.path)) for p in error.problems
            ) from None
        return self

    def setter(self, path: str) -> str | None:
        """Return the source of the last change to a path, or None if the path has the experiment's value."""
        steps = self.provenance.get(path) or self.provenance.get(self._locate(path))
        return f"set by {steps[-1].source}" if steps and len(steps) > 1 else None

    def explain(self, path: str) -> dict[str, tuple[Step, ...]]:
        """Return the steps of a path. For a node, include all paths below it.

        Raises:
            ConfigError: If the path does not exist. The error suggests the nearest names.
        """
        steps = self._list_steps(path) or self._list_steps(self._locate(path))
        if not steps:
            get(self.config, path)
            containers = [p for p in self.provenance if path.startswith(f"{p}.")]  # the path is an item in a container
            if not containers:
                message = "was not set: it has its default value, or it is passed by the parent"
                raise ConfigError(Problem(path=path, message=message))
            steps = {p: self.provenance[p] for p in containers}
        return steps

    def find_replaced(self, path: str) -> list[Decision]:
        """Return the decisions about settings that were replaced at a path, below it, or above it."""
        return filter_decisions(self.decisions, {path, self._locate(path)})

    def _list_steps(self, path: str) -> dict[str, tuple[Step, ...]]:
        return {p: s for p, s in self.provenance.items() if not path or p == path or p.startswith(f"{path}.")}

    def _locate(self, path: str) -> str:
        """Return a path with the wrappers on the way, or the path itself if it does not exist."""
        node, _, name = path.rpartition(".")
        try:
            return join(locate(self.config, node), name) if name == "type" else locate(self.config, path)
        except ConfigError:
            return path

    def to_yaml(self) -> str:
        """Return the text of a config file, which `resolve` accepts."""
        return write(self.config, self.names)


def resolve(
    request: Request | str | Path | Node[Any],
    *,
    names: Registry | None = None,
    detect: Detect | None = None,
    **options: Any,
) -> Resolved:
    """Resolve a request to a config.

    Args:
        request: A `Request`, or an experiment with `options` for `Request.from_arguments`:
            `resolve("quickstart", with_=["rope:theta=500000"], set={"max_steps": 20})`.
        names: Registry of the installed plugins (default: `registry()`).
        detect: Detects the machine if the request has no target. Its argument is the config without a mesh rule.
        options: Arguments of `Request.from_arguments`, if `request` is an experiment.

    Raises:
        RequestError: If a name is unknown, a path does not match, a value is invalid, features conflict, or a feature of the
            mesh rule is not installed.
    """
    prepare_backends()  # the caller may use the config to start JAX before it calls this again
    names = names or registry()
    if not isinstance(request, Request):
        request = Request.from_arguments(request, **options)
    elif options:
        raise TypeError(f"a Request accepts no additional options: {', '.join(options)}")
    request = merge_file(request, names)
    base = _BaseConfig.from_request(request, names)
    if request.layout is None:
        return _resolve_from(base, request, names, detect)
    layout: RequestLayout = names.entry("functions", "read_layout").load()(request.layout)
    with_layout = layout.apply(request)
    resolved = _resolve_from(base, with_layout, names)
    without_layout = attrs.evolve(request, layout=None, target=with_layout.target)
    layout.check(_resolve_from(base, without_layout, names).config, resolved.config)
    return resolved


def _resolve_from(base: "_BaseConfig", request: Request, names: Registry, detect: Detect | None = None) -> Resolved:
    return _Resolution(base, request, names, _RuleChooser(base, request, names, detect).choose()).run()


@attrs.frozen
class _BaseConfig:
    """The experiment of a request with the source of its values. Every pass over the request starts from it."""

    tree: Node[Any]
    provenance: Mapping[str, tuple[Step, ...]]

    @classmethod
    def from_request(cls, request: Request, names: Registry) -> "_BaseConfig":
        if isinstance(request.experiment, Node):
            tree, document = request.experiment, request.document
            lines, setter = (document.lines, "the default") if document else ({}, "given")
        else:
            entry = names.entry("experiments", str(request.experiment))
            tree, document = names.experiment(entry.name), None
            lines, setter = {}, f"experiment {entry.name} ({entry.origin})"
        provenance = {}
        for path, value in flatten(tree, names.display_name).items():
            line = lines.get(path)
            provenance[path] = (Step(f"{document.source}:{line}" if document and line else setter, ABSENT, value),)
        return cls(tree, provenance)


@attrs.frozen(kw_only=True)
class _RuleChoice:
    """The machine and the mesh rule of a request.

    Attributes:
        machine: The machine. None if no mesh rule is applied, or if no installed package supports the machine.
        rule_title: Title of the rule with its source, for use in messages.
        rule: The mesh rule to apply, or None.
        fallback_rule: Title, rule, and machine, if the rule has a mesh shape for parameters that cannot be sharded. It is set
            even if the rule is not applied.
        decisions: Decisions that led to the choice.
        detected: True if the machine is detected rather than requested.
    """

    machine: Machine | None = None
    rule_title: str | None = None
    rule: MeshRule | None = None
    fallback_rule: tuple[str, MeshRule, Machine] | None = None
    decisions: tuple[Decision, ...] = ()
    detected: bool = False


class _RuleChooser:
    """Chooses the machine and the mesh rule of a request."""

    def __init__(self, base: _BaseConfig, request: Request, names: Registry, detect: Detect | None):
        self.base, self.request, self.names, self.detect = base, request, names, detect
        self.decisions: list[Decision] = []
        self.fallback_rule: tuple[str, MeshRule, Machine] | None = None

    def choose(self) -> _RuleChoice:
        """Return the machine, its mesh rule, and the decisions."""
        machine, rule_title, rule = self._find_machine_and_rule()
        return _RuleChoice(
            machine=machine,
            rule_title=rule_title,
            rule=rule,
            fallback_rule=self.fallback_rule,
            decisions=tuple(self.decisions),
            detected=self.request.target is None and self.detect is not None,
        )

    @functools.cached_property
    def resolved_without_rule(self) -> Resolved:
        """The request, resolved without a mesh rule."""
        return _resolve_from(self.base, self.request.remove_rule(), self.names)

    def _find_machine_and_rule(self) -> tuple[Machine | None, str | None, MeshRule | None]:
        target = self.request.target
        if target == NO_TARGET:
            self._add_decision("mesh rule", "none", "--target none")
        if target == NO_TARGET or (target is None and self.detect is None):
            return None, None, None
        if target is not None:
            machine = find_machine(target)
            self._add_decision("machine", machine.name, f"--target {target}")
        else:
            assert self.detect is not None
            # Report an invalid config before JAX starts and waits for other processes.
            detected = self.detect(self.resolved_without_rule.check().config)
            machine = detected.machine
            if machine is None:
                self._add_decision("machine", detected.description, "no installed package supports it: no mesh rule")
                return None, None, None
            self._add_decision("machine", f"{machine.name}, {detected.description}")
        config_rules = self._read_config_rules()
        rejected = None if target or self.request.document else self._check_config_rule(machine, config_rules)
        if rejected:
            self._add_decision("left out", *rejected)
        rule_title, rule = find_rule(machine, {} if rejected else config_rules, self._count_parameters) or (None, None)
        if rule is not None and rule.fallback_shape:
            self.fallback_rule = str(rule_title), rule, machine
        if rule is not None and self.request.target is None and (rule.detected is False or self.request.document):
            prefix = "the request is a complete config; " if self.request.document else ""
            name = rejected[0] if rejected else str(rule_title).removeprefix("mesh rule ")
            self._add_decision("mesh rule", "none", f"{prefix}--target {machine.name} applies {name}")
            return None, None, None
        if rule is None:
            self._add_decision("mesh rule", "none", f"no installed package has a mesh rule for {machine.name}")
            return (machine if target else None), None, None
        self._add_decision("mesh rule", str(rule_title).removeprefix("mesh rule "))
        return machine, rule_title, rule

    def _check_config_rule(self, machine: Machine, config_rules: Mapping[str, TargetRule]) -> tuple[str, str] | None:
        """Return the path of a config rule and the reason not to apply it on a detected machine.

        Returns None if the rule applies, or if the config has no rule for the machine.
        """
        config_rule = find_config_rule(machine, config_rules)
        if config_rule is None:
            return None
        mesh, (title, rule) = get_mesh(self.base.tree), config_rule
        if mesh is not None and mesh.shape and (rule.shape or rule.rules):
            return title, f"the config has the mesh {dict(mesh.shape)}; --target {machine.name} applies the rule"
        before = self.resolved_without_rule.config
        after = _resolve_from(self.base, attrs.evolve(self.request, target=machine.name), self.names).config
        kinds = change_kinds(diff(before, after, self.names.display_name), before, after)
        decisive = [change for change, kind in kinds if kind != "execution"]
        if not decisive:
            return None
        return title, f"changes more than execution: {show_changes(decisive)}; --target {machine.name} applies it"

    def _read_config_rules(self) -> Mapping[str, TargetRule]:
        """Return the rules in `mesh.targets`: the experiment's rules with the request's settings."""
        tree = self.base.tree
        leaves = [p.split(".") for p in flatten(tree, self.names.display_name) if p.startswith("mesh.targets")]
        existing = {".".join(parts[: i + 1]) for parts in leaves for i in range(len(parts))}
        for settings in self.request.select_settings("mesh.targets", existing):
            tree = apply_settings(tree, settings, self.names, Decoder(self.names))[0]
        mesh = get_mesh(tree)
        return {} if mesh is None else mesh.targets

    def _count_parameters(self) -> int:
        try:
            config = self.resolved_without_rule.config
        except ConfigError:
            # A setting may refer to a node that the rule adds. Invalid settings are reported after the rule is applied.
            no_settings: Any = {"settings": (), "file_settings": (), "base_settings": ()}
            trial = attrs.evolve(self.request.remove_rule(), **no_settings)
            config = _resolve_from(self.base, trial, self.names).config
        count: Any = load("axlearn_core.compose.functional:count_parameters")  # imports JAX, so import it only on use
        return count(get_model_config(config) or config)

    def _add_decision(self, kind: Any, subject: str, reason: str = "") -> None:
        self.decisions.append(Decision(kind, subject, reason))


class _Resolution:
    """One pass over a request: apply the changes to its experiment in order and record them."""

    def __init__(self, base: _BaseConfig, request: Request, names: Registry, choice: _RuleChoice):
        self.base, self.request, self.names, self.choice = base, request, names, choice
        self.decoder = Decoder(names)
        self.provenance = dict(base.provenance)
        self.applied: list[tuple[str, Feature]] = []
        self.notes: list[str] = []
        self.decisions = list(choice.decisions)

    def run(self) -> Resolved:
        request, choice = self.request, self.choice
        machine, rule, rule_title = choice.machine, choice.rule, choice.rule_title
        tree = self.base.tree
        uses, rule_uses = self._select_features(
            [attrs.evolve(parse_feature(f), location=str(rule_title)) for f in rule.features] if rule else []
        )
        features = {use.name: self._build_feature(use) for use in uses}
        check_needs(features, {u.name: u.location for u in uses})
        tree = self._apply_features(tree, features)
        if machine and rule:
            self._check_installed(rule_uses, rule, str(rule_title))
            rule_uses_by_name = {use.name: use for use in rule_uses}
            for name in Order.from_features({n: self.names.feature(n) for n in rule_uses_by_name}, self.names).names:
                tree = self._apply_optional(tree, rule_uses_by_name[name], machine)
            tree = self._apply_layout(tree, rule, machine, str(rule_title))
        for settings in (*request.base_settings, request.file_settings, request.settings):
            tree = self._apply_settings(tree, settings)
        replacement = find_mesh_replacement(tree, *choice.fallback_rule[1:]) if choice.fallback_rule else None
        if choice.fallback_rule and replacement:
            before, tree = tree, patch(tree, {"mesh.shape": replacement.shape}, self.decoder.decode_value)
            self._record(diff(before, tree, self.names.display_name), choice.fallback_rule[0])
            self._add_decision("applied", "mesh", replacement.reason)
        experiment = request.experiment if isinstance(request.experiment, str) else UNNAMED
        title = request.title or get_experiment_name(tree) or experiment
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

    def _add_decision(self, kind: Any, subject: str, reason: str = "") -> None:
        self.decisions.append(Decision(kind, subject, reason))

    def _check_installed(self, uses: Iterable[FeatureUse], rule: MeshRule, rule_title: str) -> None:
        """Raise `RequestError` if a feature of the mesh rule is not installed."""
        missing = [use.name for use in uses if use.name not in self.names.claims["features"]]
        if not missing:
            return
        for name in {entry.name for entry in self.names.blocked if entry.group == "features"} & {*missing}:
            self.names.entry("features", name)  # raises an error, because it is installed but blocked
        packages = sorted({rule.packages[n] for n in missing if n in rule.packages})
        install = f"pip install {' '.join(packages)}" if packages else "install the package that provides it"
        without = " ".join(f"--without {n}" for n in missing)
        raise RequestError(
            f"{rule_title} applies {', '.join(map(repr, missing))}, which {'is' if len(missing) == 1 else 'are'} not installed\n"
            f"    fix: {install}, skip it with {without}, or disable mesh rules with --target {NO_TARGET}"
        )

    def _apply_optional(self, tree: Node[Any], use: FeatureUse, machine: Machine) -> Node[Any]:
        """Apply a feature of the mesh rule. If it does not fit, skip it with a note, because all models share the rules."""
        try:
            features = {use.name: self._build_feature(use)}
            check_needs(
                {**dict(self.applied), **features}, dict.fromkeys((*dict(self.applied), use.name), use.location)
            )
            after = _apply_feature(tree, features[use.name], self.names.entry("features", use.name))
            changes = diff(tree, after, self.names.display_name)
            kinds = change_kinds(changes, tree, after)
            decisive = [change for change, kind in kinds if kind != "execution"]
            if decisive and self.request.target is None:
                override = f"--with {use.text} or --target {machine.name} applies it"
                self._add_decision(
                    "left out", use.text, f"changes more than execution: {show_changes(decisive)}; {override}"
                )
                return tree
            tree = self._apply_features(tree, features)
        except PluginError:
            raise
        except RequestError as error:
            reason = str(error).splitlines()[0].rstrip(":")
            self.notes.append(f"{use.location}: the feature {use.name!r} was skipped: {reason}")
            self._add_decision("left out", use.text, reason)
            return tree
        self._add_decision("applied", use.text, show_changes(changes) or "the config already has it")
        return tree

    def _apply_layout(self, tree: Node[Any], rule: MeshRule, machine: Machine, rule_title: str) -> Node[Any]:
        mesh = get_mesh(tree)
        if mesh is None or not (rule.shape or rule.rules):
            return tree
        if self.request.target is None and mesh.shape:
            self._add_decision("left out", "mesh.shape, mesh.rules", f"the config has the mesh {dict(mesh.shape)}")
            return tree
        edits = {"mesh.rules": {**mesh.rules, **rule.rules}, "mesh.shape": rule.sizes(machine) or dict(mesh.shape)}
        after = patch(tree, edits, self.decoder.decode_value)
        changes = diff(tree, after, self.names.display_name)
        self._record(changes, rule_title)
        if changes:
            self._add_decision("applied", "mesh", show_changes([c for c in changes if c.new is not ABSENT], limit=4))
        return after

    def _record(self, changes: Iterable[Change], source: str) -> None:
        for change in changes:
            step = Step(source, change.old, change.new)
            self.provenance[change.path] = (*self.provenance.get(change.path, ()), step)

    def _select_features(self, rule_features: Sequence[FeatureUse]) -> tuple[list[FeatureUse], list[FeatureUse]]:
        """Return the requested features and those that the mesh rule adds, without duplicates or removed features.

        If both list a feature, the user's options take precedence.
        """
        uses: dict[str, FeatureUse] = {}
        for use in self.request.features:
            uses[use.name] = merge_uses(uses[use.name], use) if use.name in uses else use
        rule_uses = {use.name: use for use in rule_features}
        for name in self.request.without:
            if name not in uses and name not in rule_uses:
                names = {*uses, *rule_uses}
                hint = f"\n    requested: {', '.join(sorted(names))}" if names else "; no features are requested"
                raise RequestError(f"--without {name}: this feature is not requested{hint}")
        removed = set(self.request.without)
        for use in rule_uses.values():
            if use.name in {*removed, *uses}:
                self._add_decision(
                    "left out", use.text, f"--without {use.name}" if use.name in removed else "you request it yourself"
                )
        requested = [u for u in uses.values() if u.name not in removed]
        return requested, [u for u in rule_uses.values() if u.name not in {*removed, *uses}]

    def _build_feature(self, use: FeatureUse) -> Feature:
        """Build the feature with its options."""
        try:
            cls = self.names.feature(use.name)
        except PluginError:
            raise
        except RequestError as error:
            raise RequestError(f"{use.location}: {error}") from None
        try:
            return check(self.decoder.decode_value(cls(), "", use.options))
        except ConfigError as error:
            source, fix = use.location, f"see its options with `axlearn features show {use.name}`"
            raise ConfigError(
                attrs.evolve(p, path=f"{use.name}.{p.path}", location=source, fix=p.fix or fix) for p in error.problems
            ) from None

    def _apply_features(self, tree: Node[Any], features: Mapping[str, Feature]) -> Node[Any]:
        start, changed = tree, dict[tuple[str, str], list[tuple[Entry, Change]]]()
        order = Order.from_features(features, self.names)
        for name, feature in ((name, features[name]) for name in order.names):
            entry = self.names.entry("features", name)
            before, tree = tree, _apply_feature(tree, feature, entry, self._name_earlier_feature)
            changes = diff(before, tree, self.names.display_name)
            if not changes and not feature.in_effect(tree):
                raise RequestError(
                    f"the feature {name!r} ({entry.origin}) changes nothing in this config: it matches no node, or "
                    f"the config already has it\n    fix: remove it; see `axlearn features show {name}`"
                )
            if not changes:
                check_not_hidden(name, feature, start, tree, dict(self.applied))
                if any(use.name == name for use in self.request.features):
                    self._add_decision("unchanged", f"the feature {name!r}", "the config already has it")
            if feature.stage == "execute":
                _check_execution(changes, before, tree, entry)
            for change in changes:
                earlier = changed.setdefault((feature.stage, change.path), [])
                for other in earlier:
                    if other[0].name not in order.predecessors[name]:
                        raise _conflict_error((entry, change), other, feature.stage)
                earlier.append((entry, change))
            if changes:
                sources = {path: steps[-1].source for path, steps in self.provenance.items()}
                self.decisions.extend(describe_lost(before, tree, name, sources, self.names.display_name))
            self._record(changes, f"feature {name} ({entry.origin})")
            self.applied.append((name, feature))
        return tree

    def _name_earlier_feature(self, problem: Problem) -> Problem:
        """Add the feature that set the value at the problem's path, if one did."""
        steps = self.provenance.get(problem.path) or self.provenance.get(join(problem.path, "type")) or ()
        if problem.location or len(steps) < 2 or not steps[-1].source.startswith("feature "):
            return problem
        return attrs.evolve(problem, location=f"set by {steps[-1].source}")

    def _apply_settings(self, tree: Node[Any], settings: Sequence[Setting]) -> Node[Any]:
        after, changes = apply_settings(tree, settings, self.names, self.decoder)
        index = SettingIndex(settings, after)
        if changes:
            sources = {path: steps[-1].source for path, steps in self.provenance.items()}
            lost = describe_lost_to_settings(tree, after, settings, sources, self.names.display_name)
            self.decisions.extend(d for d in lost if d not in self.decisions)
        for change in changes:
            self._record([change], index.find_source(change.path))
        self.decisions.extend(describe_replaced(tree, after, settings, self.names.display_name))
        return after


def _apply_feature(
    tree: Node[Any],
    feature: Feature,
    entry: Entry,
    locate_problem: Callable[[Problem], Problem] = lambda problem: problem,
) -> Node[Any]:
    """Apply a feature. Raise `RequestError` if it does not fit the config, or `PluginError` if it fails."""
    try:
        result = feature.apply(tree)
    except PluginError:
        raise
    except ConfigError as error:
        located = ConfigError(map(locate_problem, error.problems))
        raise RequestError(
            f"the feature {entry.name!r} ({entry.origin}) does not fit this config:\n{located}"
        ) from error
    except AxlearnError as error:
        raise RequestError(f"the feature {entry.name!r} ({entry.origin}) does not fit this config:\n{error}") from error
    except Exception as error:  # a feature is plugin code and may raise any exception
        raise entry.wrap_error("failed in apply()", error) from error
    if not isinstance(result, Node):
        raise PluginError(f"apply() of the {entry} returned {type(result).__name__}, not a config node")
    return result


def _check_execution(changes: tuple[Change, ...], before: Node[Any], after: Node[Any], entry: Entry) -> None:
    """Raise `PluginError` if a feature of the `execute` stage changes fields that affect more than execution."""
    for change, kind in change_kinds(changes, before, after):
        if kind not in ("execution", "microbatches"):
            raise PluginError(
                f"the feature {entry.name!r} ({entry.origin}) has the stage 'execute' but changes {change.path}, which is "
                f"{kind}: {change.old!r} -> {change.new!r}\n"
                '    fix: change its stage, or mark the field with setting(kind="execution") if it does not affect results'
            )


def _conflict_error(later: tuple[Entry, Change], earlier: tuple[Entry, Change], stage: str) -> RequestError:
    """Return the error for two features in the same stage that change the same path without a defined order."""
    (a, first), (b, second) = earlier, later
    return RequestError(
        f"two features in stage {stage!r} change {second.path}:\n"
        f"    {a.name} ({a.origin}): {first.old!r} -> {first.new!r}\n"
        f"    {b.name} ({b.origin}): {second.old!r} -> {second.new!r}\n"
        "    fix: remove one of them; or, if you maintain one, declare its order with `before` or `after`"
    )
