"""Make the pictures of docs/gallery.md with the commands that the page shows.

    python scripts/gallery.py [NAME ...]

rich renders terminal output as SVG, and headless Chromium takes screenshots of pages as PNG. Needs chromium.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

OUT = Path(__file__).resolve().parents[1] / "docs/images/gallery"
COLUMNS = 110
THEME = TerminalTheme(
    (250, 250, 250),
    (36, 41, 47),
    [
        (36, 41, 47),
        (207, 34, 46),
        (17, 99, 41),
        (149, 90, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (110, 119, 129),
    ],
)
TERMINAL = {
    "config-diff": "axlearn config diff llama2-7b llama2-7b --with moe:num_experts=8,top_k=2 --with rope:theta=500000",
    "config-explain": "axlearn config explain quickstart model.decoder.layer.attention.position --with rope:theta=500000",
    "error": "axlearn config check quickstart --set model.decoder.num_layer=6 --set learner.optimizer.type=adam",
    "plan": "axlearn plan llama2-7b --target h100-8x32",
    "kernels": "axlearn kernels explain llama2-7b --target h100-8x32",
}
"""Name -> a command whose output is the picture."""
RUN = "axlearn train quickstart --steps 120 --run-dir run --set model.decoder.num_layers=2 --set evaluators.eval.every_steps=40"
PAGES = {
    "report": ((RUN, "axlearn report run"), "run/report.html", 1500),
    "search": (
        ("axlearn plan search llama2-7b --target h100-8x32 --front 6 --budget 4 --html search.html",),
        "search.html",
        900,
    ),
}
"""Name -> (commands, page that the last command writes, height of the picture in pixels)."""


def run(command: str, folder: Path, *, check: bool = True) -> str:
    """Run an `axlearn` command with this interpreter, and return its output."""
    words = [sys.executable, "-m", "axlearn_core", *shlex.split(command)[1:]]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": str(COLUMNS)}
    result = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if check and result.returncode:
        raise SystemExit(f"{command}: exit code {result.returncode}\n{result.stderr[-2000:]}")
    return (result.stdout + ("" if result.stdout else result.stderr)).replace(str(folder), "~")


def terminal(name: str, command: str, folder: Path) -> Path:
    """Return an SVG of a command and its output."""
    lines = run(command, folder, check=name != "error").rstrip().splitlines()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), legacy_windows=False)  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines[:44]:
        console.print(
            Text(line, style={"+": "green", "-": "red", "~": "blue"}.get(line[:1] if line[1:2] == " " else "", ""))
        )
    if len(lines) > 44:
        console.print(Text(f"... {len(lines) - 44} more lines", style="bright_black"))
    # Fixed names instead of hashes keep the diff of a new picture small; no font is fetched from anywhere.
    svg = console.export_svg(title=" ".join(command.split()[:3]), theme=THEME, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    file = OUT / f"{name}.svg"
    file.write_text(svg, "utf-8")
    return file


def page(name: str, folder: Path) -> Path:
    """Take a screenshot of a page that a command writes, as PNG."""
    commands, result, height = PAGES[name]
    for command in commands:
        run(command, folder)
    html = folder / result
    html.write_text(html.read_text("utf-8").replace(str(folder), "~"), "utf-8")
    chromium = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if chromium is None:
        raise SystemExit("pictures of pages need chromium\n    fix: apt-get install chromium")
    file = OUT / f"{name}.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size=1100,{height}"]
    subprocess.run([chromium, *options, f"--screenshot={file}", html.as_uri()], check=True, capture_output=True)
    return file


def main() -> None:
    """Make the named files, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *TERMINAL, *PAGES], metavar="NAME", help="default: all")
    names = parser.parse_args().names or [*TERMINAL, *PAGES]
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(terminal(name, TERMINAL[name], Path(folder)) if name in TERMINAL else page(name, Path(folder)))


if __name__ == "__main__":
    main()
