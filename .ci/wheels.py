"""Builds every distribution and uses the wheels in an empty environment, as someone who installs them would."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = [
    "axlearn_core",
    "axlearn_index",
    "axlearn_testing",
    *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("axlearn_plugins_*/pyproject.toml")),
    *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("plugins/*/pyproject.toml")),
]
EXAMPLES = sorted(p.parent for p in ROOT.glob("examples/*/pyproject.toml") if not p.parent.is_symlink())
TINY = [
    "train", "quickstart", "--steps", "3", "--run-dir", "run",
    "--set", "model.decoder.num_layers=1", "--set", "model.decoder.hidden_dim=32",
    "--set", "input.batch_size=2", "--set", "input.sequence_length=32", "--set", "evaluators={}",
]  # fmt: skip

# Of a 7B: enough for each feature of the mesh rules, each kernel and the compiler.
SMALL = [
    "--set", "model.decoder.num_layers=2", "--set", "model.decoder.hidden_dim=512",
    "--set", "model.decoder.layer.attention.num_heads=4", "--set", "model.vocab_size=1024",
    "--set", "input.batch_size=256", "--set", "input.sequence_length=512",
]  # fmt: skip
BACKENDS = {"tpu": "tpu-v5p-512", "gpu": "h100-8x32", "neuron": "trn2-16x1"}


def call(*command: str, cwd: Path) -> str:
    """Runs a command; shows what it printed where it fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if process.returncode:
        sys.exit(
            f"{' '.join(command)} exited with {process.returncode}\n{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
        )
    return process.stdout


class Environment:
    """An empty environment, and what is installed in it from the wheels."""

    def __init__(self, home: Path, title: str, *wheels: str):
        self.home, venv = home, home / title
        call("uv", "venv", "-q", "--python", sys.executable, str(venv), cwd=home)
        self.python, self.axlearn = str(venv / "bin/python"), str(venv / "bin/axlearn")
        self.install(*wheels)

    def install(self, *wheels: str) -> None:
        """With their requirements: of the wheels that were built, and of the versions that were tested."""
        arguments = ("-c", str(self.home / "pins.txt"), "--find-links", str(self.home / "wheels"))
        call("uv", "pip", "install", "-q", "--python", self.python, *arguments, *wheels, cwd=self.home)

    def run(self, *arguments: str) -> str:
        """`axlearn` with these arguments."""
        return call(self.axlearn, *arguments, cwd=self.home)


def main() -> None:
    """Core alone first: it must list without any plugin. Then all, packages of third parties, and each backend."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for member in MEMBERS:
            call("uv", "build", "-q", "--wheel", "--package", get_name(member), "-o", str(home / "wheels"), cwd=ROOT)
        # The versions that the workspace pins are the ones that were tested.
        pins = call("uv", "export", "-q", "--no-hashes", "--no-emit-workspace", "--no-dev", cwd=ROOT)
        (home / "pins.txt").write_text("\n".join(line for line in pins.splitlines() if not line.startswith("#")))
        core = wheel_of(home, "axlearn-core")
        for title, requirement in (("alone", core), ("all", f"{core}[all]")):
            environment = Environment(home, title, requirement)
            environment.run("--help")
            environment.run("plugins", "list")
            print(f"core {title}: {environment.run('experiments', 'list').split() or 'no experiments'}")
        # `all` is what most people want; a distribution outside it has to work beside it.
        others = sorted({get_name(m) for m in MEMBERS} - installed(environment))
        if others:
            environment.install(*(str(wheel_of(home, name)) for name in others))
        environment.run("plugins", "doctor")
        environment.run(*TINY)
        third_parties(environment)
        for backend, target in BACKENDS.items():
            prove(home, core, backend, target)


def third_parties(environment: Environment) -> None:
    """Packages beside the wheels, as their authors make them."""
    home = environment.home
    environment.run("plugins", "new", "my-gate")
    for source in (home / "axlearn-plugins-my-gate", *EXAMPLES):
        call("uv", "build", "-q", "--wheel", str(source), "-o", str(home / "third"), cwd=home)
    environment.install(*(f"{w}[test]" if "gate" in w.name else str(w) for w in (home / "third").glob("*.whl")))
    for name in ("my-gate", "dynamic-tanh", "confidence-penalty"):
        environment.run("config", "diff", "llama2-7b", "llama2-7b", "--with", name)
    print(environment.run("plugins", "show", "my-gate"))
    for tests in (home / "axlearn-plugins-my-gate/tests", *(example / "tests" for example in EXAMPLES)):
        pytest = (environment.python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(tests))
        print(call(*pytest, cwd=home))
    print(environment.run("generate", "run", "--prompt", "def ", "--max-tokens", "4"))


def prove(home: Path, core: Path, backend: str, target: str) -> None:
    """The core and one backend train the quickstart and plan a 7B, with each feature that the mesh rule names."""
    start = time.monotonic()
    environment = Environment(home, backend, str(core), str(wheel_of(home, f"axlearn-plugins-{backend}")))
    environment.run(*TINY, "--run-dir", f"run-{backend}")
    plan = environment.run("plan", "llama2-7b", "--target", target, "--json", *SMALL)
    if left_out := [note for note in json.loads(plan)["notes"] if "left out" in note]:
        sys.exit(f"{backend}: {left_out}")
    print(f"core and {backend}: trains, and plans for {target}, in {time.monotonic() - start:.0f} s")


def installed(environment: Environment) -> set[str]:
    """The names of the distributions of this project that an environment has."""
    listing = call("uv", "pip", "list", "-q", "--format", "json", "--python", environment.python, cwd=environment.home)
    return {package["name"] for package in json.loads(listing) if package["name"].startswith("axlearn-")}


def wheel_of(home: Path, name: str) -> Path:
    """The wheel of a distribution."""
    (wheel,) = (home / "wheels").glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def get_name(member: str) -> str:
    """The distribution's name."""
    line = next(x for x in (ROOT / member / "pyproject.toml").read_text().splitlines() if x.startswith("name"))
    return line.split('"')[1]


if __name__ == "__main__":
    main()
