"""Count changed lines with git, and fit their growth."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LAUNCHER = "launch.py"


def git(root: Path, *words: str) -> str:
    """Return the output of a git command."""
    identity = ("-c", "user.name=user", "-c", "user.email=user@localhost", "-c", "commit.gpgsign=false")
    config = ("-c", "core.autocrlf=false", "-c", "gc.auto=0", "-c", "core.hooksPath=/dev/null")
    process = subprocess.run(
        ["git", "-C", str(root), *identity, *config, *words], capture_output=True, text=True, check=True
    )
    return process.stdout


def commit(root: Path) -> None:
    """Create a repository with the current content of the folder."""
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "The project before the feature")


def changed(root: Path) -> dict[str, int]:
    """Return the added or changed lines since the commit by file, without the packages of features."""
    git(root, "add", "-A")
    text = git(root, "diff", "--cached", "--numstat", "--no-renames", "HEAD", "--", ".", ":(exclude)packages")
    rows = (line.split("\t") for line in text.splitlines())
    return {name: max(int(added), int(deleted)) for added, deleted, name in rows}  # a changed line is in both columns


def undo(root: Path) -> None:
    """Reset the folder to the commit."""
    git(root, "reset", "-q", "--hard")
    git(root, "clean", "-qfdx")


def slope(sizes: Sequence[int], lines: Sequence[int]) -> float:
    """Return the lines per additional module or experiment, by least squares, or 0 for a single size."""
    if len(set(sizes)) < 2:
        return 0.0
    fitted = float(np.polyfit(sizes, lines, 1)[0])
    return 0.0 if len(set(lines)) == 1 else round(fitted, 6)  # avoid a rounding error if nothing grows
