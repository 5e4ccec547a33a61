"""What a shell offers after Tab: names from the metadata of installed packages, so that nothing of theirs is imported."""

import click
from click.shell_completion import CompletionItem

from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.plugins.registry import Group, registry


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed experiments, and as the first word the subcommands of a command; or files if no name begins so."""
    if isinstance(ctx.command, ExtensibleCommand):
        words = [CompletionItem(word) for word in ctx.command.list_commands(ctx) if word.startswith(incomplete)]
        return [*words, *_names("experiments", incomplete)] or [CompletionItem(incomplete, type="file")]
    return _names("experiments", incomplete) or [CompletionItem(incomplete, type="file")]


def complete_features(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed features."""
    return _names("features", incomplete)


def _names(group: Group, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(registry().claims[group]) if name.startswith(incomplete)]
