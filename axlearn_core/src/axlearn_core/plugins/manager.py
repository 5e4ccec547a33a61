"""The hooks of what is installed (pluggy)."""

import functools
from typing import Any

import pluggy

from axlearn_core.contracts.target import Target
from axlearn_core.errors import PluginError, nearest
from axlearn_core.plugins import hookspecs
from axlearn_core.plugins.registry import BLOCK, Entry, Registry, registry
from axlearn_core.plugins.removed import HOOKS


class Host:
    """The plugins of a registry, loaded by name, so that nothing depends on the order of installation.

    Raises:
        PluginError: a module cannot be loaded, or has a hook that does not exist.
    """

    def __init__(self, registry: Registry):
        self.manager = pluggy.PluginManager("axlearn")
        self.manager.add_hookspecs(hookspecs)
        self.entries: dict[str, Entry] = {}
        for entry in registry.entries("plugins"):
            register(self.manager, entry)
            self.entries[entry.name] = entry

    @property
    def hook(self) -> pluggy.HookRelay:
        """The hooks, to call by name: `host().hook.axlearn_targets()` is a list of what the plugins returned."""
        return self.manager.hook

    def replies(self, hook: str, **arguments: object) -> list[tuple[Entry, Any]]:
        """(the plugin, what it returned) for each plugin that returns something, by the plugin's name."""
        results = []
        for implementation in getattr(self.hook, hook).get_hookimpls():
            kwargs = {name: arguments[name] for name in implementation.argnames}
            if (result := implementation.function(**kwargs)) is not None:
                results.append((self.entries[implementation.plugin_name], result))
        return sorted(results, key=lambda reply: reply[0].name)

    def answers(self, hook: str, **arguments: object) -> list[tuple[str, Any]]:
        """As `replies`, with a title of each plugin: its name, distribution and version."""
        return [(f"{entry.name} of {entry.origin}", result) for entry, result in self.replies(hook, **arguments)]

    def only(self, hook: str, **arguments: object) -> Any | None:
        """What the one plugin that answers returns; None where none does.

        Raises:
            PluginError: more than one plugin answers.
        """
        answers = self.answers(hook, **arguments)
        if len(answers) > 1:
            raise _claim_error(
                f"{hook}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})", [t for t, _ in answers]
            )
        return answers[0][1] if answers else None

    def target(self, device_kind: str) -> Target | None:
        """What is known of a device by its `jax.Device.device_kind`."""
        matches = [
            (title, target)
            for title, targets in self.answers("axlearn_targets")
            for target in targets
            if device_kind in target.device_kinds
        ]
        if len(matches) > 1:
            raise _claim_error(f"the device kind {device_kind!r}", [f"{title} ({t.name})" for title, t in matches])
        return matches[0][1] if matches else None


def register(manager: pluggy.PluginManager, entry: Entry) -> None:
    """Loads one module and registers its hooks; raises `PluginError` for hooks that do not exist or do not fit."""
    module = entry.load()
    try:
        manager.register(module, name=entry.name)
    except pluggy.PluginValidationError as error:
        raise entry.failed("has a hook that does not fit", error) from error
    hooks = [n for n in vars(hookspecs) if n.startswith("axlearn_")]
    wrong = [c.name for c in manager.get_hookcallers(module) or () if c.name not in hooks]
    if wrong:
        manager.unregister(module)
        if wrong[0] in HOOKS:
            raise PluginError(
                f"the {entry} implements the hook {wrong[0]!r}, which was removed\n    instead: {HOOKS[wrong[0]]}\n"
                f"    fix: {entry.remedy}"
            )
        close = nearest(wrong[0], hooks)
        raise PluginError(
            f"the {entry} implements the hook {wrong[0]!r}, which does not exist\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + f"    known: {', '.join(hooks)}\n    fix: {entry.remedy}"
        )
    manager.check_pending()


def _claim_error(claim: str, titles: list[str]) -> PluginError:
    return PluginError(
        f"{claim} is claimed by {' and by '.join(titles)}\n    fix: uninstall one of them, or leave one out with {BLOCK}"
    )


def host(names: Registry | None = None) -> Host:
    """The plugins of this process (or of the given registry), loaded once."""
    return _host(names or registry())


@functools.lru_cache(maxsize=1)
def _host(names: Registry) -> Host:
    return Host(names)
