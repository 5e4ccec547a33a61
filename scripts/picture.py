"""Draw the loss curve of a run as one SVG file, for the README.

    python scripts/picture.py RUN_DIR [--out docs/images/quickstart.svg]

The chart is the one of `axlearn report`, without what answers the mouse; every number in it comes from the run directory.
"""

import argparse
import re
from importlib.resources import files
from pathlib import Path

from axlearn_plugins_tools.reporting.charts import WIDTH, Series, line_chart, smooth, text
from axlearn_plugins_tools.reporting.durations import clock
from axlearn_plugins_tools.reporting.run import Run, points, read_run

OUT = Path(__file__).resolve().parents[1] / "docs/images/quickstart.svg"
HEIGHT, HEAD = 340, 84


def picture(run: Run) -> str:
    """Return the SVG of a loss curve."""
    name, facts = words(run)
    loss = points(run.train, "loss")
    series = [
        Series(label="training", style="raw", points=loss),
        Series(label="training, smoothed", style="main", points=smooth(loss, max(1, len(loss) // 20))),
        Series(label="validation", style="second", points=points(run.evaluations, "eval_loss"), dots=True),
    ]
    chart = line_chart("loss over steps", series, height=HEIGHT, log=True)
    body = re.sub(r'<g class="hit">.*?</g></g>', "", chart[chart.index("<svg") :])
    body = re.sub(r"^<svg[^>]*>", "", body).removesuffix("</svg>")
    curves = [s for s in series if s.points]
    keys = "".join(
        f'<line class="line {s.style}" x1="{58 + 170 * i}" x2="{78 + 170 * i}" y1="74" y2="74"/>'
        f'<text x="{84 + 170 * i}" y="78">{text(s.label)}</text>'
        for i, s in enumerate(curves)
    )
    # Only the rules of the report's style sheet that colour the chart; a page of its own has no body or cards.
    style = files("axlearn_plugins_tools.reporting").joinpath("style.css").read_text()
    rules = "".join(re.findall(r"(?m)^(?::root|@media \(prefers-color-scheme|\s+--|\.grid |\.line|circle).*\n", style))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + HEAD}" role="img" '
        f'aria-label="{text(name)}: {text(facts)}"><style>{rules}text {{ fill: var(--dim); font: 12px system-ui, sans-serif; }} '
        ".title { fill: var(--ink); font-size: 15px; font-weight: 600; }</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT + HEAD}" rx="10" style="fill: var(--card)"/>'
        f'<text class="title" x="58" y="28">{text(name)}</text><text x="58" y="48">{text(facts)}</text>{keys}'
        f'<g transform="translate(0 {HEAD})">{body}</g></svg>\n'
    )


def words(run: Run) -> tuple[str, str]:
    """Return the command, and a line with the model, the data, the time and the final loss."""
    lock = run.lock
    parts = [
        f"{lock['parameters'] / 1e6:.1f}M parameters" if "parameters" in lock else "",
        f"{run.last_step:,} steps on {lock.get('devices', '?')}" + (f" in {clock(run.seconds)}" if run.seconds else ""),
    ]
    if series := points(run.evaluations, "eval_nats_per_byte"):
        parts.append(f"{series[-1][1]:.2f} nats per byte on held-out files")
    return f"axlearn train {lock.get('experiment', '')}", " · ".join(p for p in parts if p)


def main() -> None:
    """Parse the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture(read_run(args.run_dir)), "utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
