"""Builds every distribution and uses the wheels in an empty environment, as someone who installs them would."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = [
    "axlearn_core",
    *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("axlearn_plugins_*/pyproject.toml")),
    *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("plugins/*/pyproject.toml")),
]
TINY = [
    "train", "quickstart", "--steps", "3", "--run-dir", "run",
    "--set", "model.decoder.num_layers=1", "--set", "model.decoder.hidden_dim=32",
    "--set", "input.batch_size=2", "--set", "input.sequence_length=32", "--set", "evaluators={}",
]  # fmt: skip


def call(*command: str, cwd: Path) -> str:
    """Runs a command; shows what it printed where it fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def main() -> None:
    """Core alone first: it must list and check without any plugin. Then all, then packages of third parties."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for member in MEMBERS:
            call("uv", "build", "-q", "--wheel", "--package", name_of(member), "-o", str(home / "wheels"), cwd=ROOT)
        wheels = sorted((home / "wheels").glob("*.whl"))
        # The versions that the workspace pins are the ones that were tested.
        pins = call("uv", "export", "-q", "--no-hashes", "--no-emit-workspace", "--no-dev", cwd=ROOT)
        (home / "pins.txt").write_text("\n".join(line for line in pins.splitlines() if not line.startswith("#")))
        for title, chosen in (
            ("core alone", [w for w in wheels if w.name.startswith("axlearn_core")]),
            ("all", wheels),
        ):
            venv = home / title.replace(" ", "-")
            call("uv", "venv", "-q", "--python", sys.executable, str(venv), cwd=home)
            python = str(venv / "bin/python")
            install = ("uv", "pip", "install", "-q", "--python", python, "-c", str(home / "pins.txt"))
            call(*install, *map(str, chosen), cwd=home)
            axlearn = str(venv / "bin/axlearn")
            call(axlearn, "--help", cwd=home)
            call(axlearn, "plugins", "doctor", cwd=home)
            print(f"{title}: {call(axlearn, 'experiments', 'list', cwd=home).split() or 'no experiments'}")
        call(axlearn, *TINY, cwd=home)
        # A third party's package beside the wheels, as its author makes it.
        call(axlearn, "plugins", "new", "my-gate", cwd=home)
        for source in (home / "axlearn-plugins-my-gate", ROOT / "examples/my_norm_plugin"):
            call("uv", "build", "-q", "--wheel", str(source), "-o", str(home / "third"), cwd=home)
        third = [f"{w}[test]" if "gate" in w.name else str(w) for w in (home / "third").glob("*.whl")]
        call(*install, "--find-links", str(home / "wheels"), *third, cwd=home)
        for name in ("my-gate", "dynamic-tanh"):
            call(axlearn, "config", "diff", "llama2-7b", "llama2-7b", "--with", name, cwd=home)
        print(call(axlearn, "plugins", "show", "my-gate", cwd=home))
        for tests in (home / "axlearn-plugins-my-gate/tests", ROOT / "examples/my_norm_plugin/tests"):
            command = (python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(tests))
            print(call(*command, cwd=home))
        print(call(axlearn, "generate", "run", "--prompt", "def ", "--max-tokens", "4", cwd=home))


def name_of(member: str) -> str:
    """The distribution's name."""
    line = next(x for x in (ROOT / member / "pyproject.toml").read_text().splitlines() if x.startswith("name"))
    return line.split('"')[1]


if __name__ == "__main__":
    main()
