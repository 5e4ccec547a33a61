"""What a shell offers after Tab: names from the metadata of installed packages, so that nothing of theirs is imported."""

import click
from click.shell_completion import CompletionItem

from axlearn_core.plugins.registry import Group, registry


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed experiments, or files where no name begins so."""
    return _names("experiments", incomplete) or [CompletionItem(incomplete, type="file")]


def complete_features(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed features."""
    return _names("features", incomplete)


def _names(group: Group, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(registry().claims[group]) if name.startswith(incomplete)]
