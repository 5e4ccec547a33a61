"""Load the installed plugins and call their hooks, using pluggy."""

import functools
from typing import Any

import pluggy

from axlearn_core.contracts.target import Target
from axlearn_core.errors import PluginError, nearest
from axlearn_core.plugins import hookspecs
from axlearn_core.plugins.registry import BLOCK, Entry, Registry, registry
from axlearn_core.plugins.removed_names import HOOKS


class Host:
    """The loaded plugins of a registry.

    Plugins are loaded in alphabetical order, so the order of installation does not matter.

    Raises:
        PluginError: If a module cannot be loaded or implements an unknown hook.
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
        """Hooks by name. `host().hook.axlearn_targets()` returns the list of results from all plugins."""
        return self.manager.hook

    def call_with_entries(self, hook: str, **arguments: object) -> list[tuple[Entry, Any]]:
        """Call a hook and return (plugin, result) pairs, sorted by plugin name. None results are skipped."""
        results = []
        for implementation in getattr(self.hook, hook).get_hookimpls():
            kwargs = {name: arguments[name] for name in implementation.argnames}
            if (result := implementation.function(**kwargs)) is not None:
                results.append((self.entries[implementation.plugin_name], result))
        return sorted(results, key=lambda pair: pair[0].name)

    def call(self, hook: str, **arguments: object) -> list[tuple[str, Any]]:
        """Call a hook as `call_with_entries` does, but return (title, result) pairs.

        A title contains the plugin's name, distribution and version.
        """
        pairs = self.call_with_entries(hook, **arguments)
        return [(f"{entry.name} of {entry.origin}", result) for entry, result in pairs]

    def call_single(self, hook: str, **arguments: object) -> Any | None:
        """Call a hook that at most one plugin may answer, and return its result or None.

        Raises:
            PluginError: If more than one plugin returns a result.
        """
        results = self.call(hook, **arguments)
        if len(results) > 1:
            raise _claim_error(
                f"{hook}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})", [t for t, _ in results]
            )
        return results[0][1] if results else None

    def target(self, device_kind: str) -> Target | None:
        """Return the target of a `jax.Device.device_kind`, or None if no plugin supports it.

        Raises:
            PluginError: If more than one plugin claims the device kind.
        """
        matches = [
            (title, target)
            for title, targets in self.call("axlearn_targets")
            for target in targets
            if device_kind in target.device_kinds
        ]
        if len(matches) > 1:
            raise _claim_error(f"the device kind {device_kind!r}", [f"{title} ({t.name})" for title, t in matches])
        return matches[0][1] if matches else None


def register(manager: pluggy.PluginManager, entry: Entry) -> None:
    """Load a plugin module and register its hooks. Raise `PluginError` if a hook is unknown or has a wrong signature."""
    module = entry.load()
    try:
        manager.register(module, name=entry.name)
    except pluggy.PluginValidationError as error:
        raise entry.wrap_error("has a hook with a wrong signature", error) from error
    hooks = [n for n in vars(hookspecs) if n.startswith("axlearn_")]
    unknown = [c.name for c in manager.get_hookcallers(module) or () if c.name not in hooks]
    if unknown:
        manager.unregister(module)
        if unknown[0] in HOOKS:
            raise PluginError(
                f"the {entry} implements the hook {unknown[0]!r}, which was removed\n    instead: {HOOKS[unknown[0]]}\n"
                f"    fix: {entry.remedy}"
            )
        close = nearest(unknown[0], hooks)
        raise PluginError(
            f"the {entry} implements the hook {unknown[0]!r}, which does not exist\n"
            + (f"    did you mean: {', '.join(close)}?\n" if close else "")
            + f"    known: {', '.join(hooks)}\n    fix: {entry.remedy}"
        )
    manager.check_pending()


def _claim_error(claim: str, titles: list[str]) -> PluginError:
    return PluginError(
        f"{claim} is claimed by {' and by '.join(titles)}\n    fix: uninstall one of them, or leave one out with {BLOCK}"
    )


def host(names: Registry | None = None) -> Host:
    """Return the loaded plugins of this process, or of the given registry. The result is cached."""
    return _host(names or registry())


@functools.lru_cache(maxsize=1)
def _host(names: Registry) -> Host:
    return Host(names)
