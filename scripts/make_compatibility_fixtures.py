"""Write the fixtures of the compatibility tests: small runs, and hashes of the shipped programs.

    uv run python scripts/make_compatibility_fixtures.py programs     # for the JAX that runs it
    uv run python scripts/make_compatibility_fixtures.py runs

Later versions must be able to open the runs. The current code trains them, so make new runs only if a format is dropped on purpose.
`programs` adds the hashes of the installed JAX version if the file has none. `--update` replaces them, and `--only quickstart@`
limits that to the cases whose names begin with this prefix.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures"
sys.path.insert(0, str(ROOT / "tests"))

SETTINGS = [
    "input.source={type: files, paths: text.txt, chunk_bytes: 400, validation_fraction: 0.2}",
    "input.tokenizer={type: byte-tokenizer}",
    "model.vocab_size=264",
    "model.decoder.num_layers=2",
    "model.decoder.hidden_dim=16",
    "model.decoder.layer.attention.num_heads=2",
    "model.decoder.layer.feed_forward.hidden_dim=32",
    "learner.optimizer={type: adamw, learning_rate: 0.01}",
    "input.batch_size=4",
    "input.sequence_length=64",
    "evaluators={eval: {type: loss-evaluator, every_steps: 10}}",
    "trackers=[{type: jsonl}]",
    "checkpointer.every_steps=10",
    "log_every_steps=1",
]
RUNS = {
    "run_of_llama": (),
}
"""Folder -> features."""


def make_programs(update: bool, only: str) -> None:
    """Add the hashes of the installed JAX version to `programs.json`, for the cases whose names begin with `only`."""
    import conftest  # noqa: F401  before JAX: eight virtual devices
    import jax

    from support import program_hashes

    file = FIXTURES / "programs.json"
    stored_programs = json.loads(file.read_text()) if file.exists() else {}
    if jax.__version__ in stored_programs and not update:
        sys.exit(f"{file} already has hashes of JAX {jax.__version__}\n    fix: pass --update to replace them")
    cases = {case: program_hashes.fingerprints(case) for case in program_hashes.cases() if case.startswith(only)}
    stored_programs[jax.__version__] = {**stored_programs.get(jax.__version__, {}), **cases} if only else cases
    file.write_text(json.dumps(dict(sorted(stored_programs.items())), indent=1) + "\n")


def make_runs() -> None:
    """Train on a text of this repository. Keep the checkpoints of steps 10 and 20, and the text that the model generates."""
    text = (ROOT / "docs/concepts.md").read_text()[:6000]
    for name, features in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            (home / "text.txt").write_text(text)
            words = [word for setting in SETTINGS for word in ("--set", setting)]
            words += [word for feature in features for word in ("--with", feature)]
            axlearn("train", "quickstart", "--steps", "20", "--run-dir", "run", *words, cwd=home)
            generated = axlearn("generate", "run", "--prompt", "A config ", "--max-tokens", "24", cwd=home)
            (home / "generated.txt").write_text(generated)
            shutil.rmtree(home / "run/compiled", ignore_errors=True)  # of this processor
            shutil.rmtree(FIXTURES / name, ignore_errors=True)
            shutil.copytree(home, FIXTURES / name)


def axlearn(*words: str, cwd: Path) -> str:
    """Run a command and return its standard output."""
    command = [sys.executable, "-m", "axlearn_core", *words]
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["programs", "runs"])
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--only", default="", metavar="PREFIX")
    options = parser.parse_args()
    make_programs(options.update, options.only) if options.what == "programs" else make_runs()
