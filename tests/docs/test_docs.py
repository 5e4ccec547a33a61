"""Pages: commands and Python run as written, links resolve, and every command is documented."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from axlearn_core.cli.extensible import ExtensibleCommand
from support import code_blocks
from support.paths import ROOT, TESTS

PLUGINS = [ROOT / f"examples/{name}" for name in ("my_attention", "my_norm_plugin", "my_objective_plugin")]
"""What the pages use."""
PARTS, CAPTIONS = ROOT / "examples/my_parts", ROOT / "examples/my_captions"
MODEL = ROOT / "tests/plugins/models/huggingface/fixtures/qwen3"
"""What a reader would have downloaded."""
PAGES = sorted(
    [
        *ROOT.glob("README.md"),
        *ROOT.glob("CONTRIBUTING.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/tutorials/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
MARKDOWN = sorted(
    [
        *PAGES,
        *(ROOT / name for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "axlearn_core/README.md")),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("axlearn_plugins_*/README.md"),
    ]
)
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
Run = Callable[[str, str, Path], dict]


def install(plugin: Path, site: Path) -> Path:
    """An example plugin in a directory, as an installed distribution would be: its metadata, made from its pyproject.toml."""
    (source,) = (plugin / "src").iterdir()
    shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {r}\n" for r in project["dependencies"])
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{requires}"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    return site


@pytest.fixture(scope="session")
def installed_plugins(tmp_path_factory) -> Path:
    """The example plugins that the pages use."""
    site = tmp_path_factory.mktemp("site")
    for plugin in PLUGINS:
        install(plugin, site)
    return site


def environment(site: Path, flags: str = "") -> dict[str, str]:
    """What a user has: one device, and the example plugins installed."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(site)}


@contextlib.contextmanager
def open_worker(env: dict[str, str], *options: str) -> Iterator[Run]:
    """Yield a function that runs a block in a directory, in a worker process."""
    worker = subprocess.Popen(
        [sys.executable, str(TESTS / "support/command_worker.py"), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert worker.stdin
    assert worker.stdout

    def call(kind: str, text: str, cwd: Path) -> dict:
        worker.stdin.write(json.dumps({"cwd": str(cwd), "kind": kind, "text": text}) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    yield call
    worker.stdin.close()
    worker.wait(timeout=60)
    worker.stdout.close()


@pytest.fixture(scope="session")
def run(installed_plugins, request) -> Iterator[Run]:
    """Runs a block in a directory. What is slow trains at full size: there, programs are compiled well and not fast."""
    flags = "" if request.config.option.markexpr.startswith("slow") else os.environ["XLA_FLAGS_OF_ONE_DEVICE"]
    with open_worker(environment(installed_plugins, flags)) as call:
        yield call


@pytest.fixture(scope="session")
def run_on_any_platform(installed_plugins) -> Iterator[Run]:
    """Like `run`, but JAX starts anew and tries every platform, as for a user without accelerators."""
    env = environment(installed_plugins, os.environ["XLA_FLAGS_OF_ONE_DEVICE"])
    hidden = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
    with open_worker({k: v for k, v in env.items() if k not in hidden}, "--fork") as call:
        yield call


def follow(page: Path, run: Run, cwd: Path, *, slow: bool) -> None:
    """Does what a page says, in order."""
    if page.parent.parent == ROOT / "examples":
        shutil.copytree(page.parent, cwd, dirs_exist_ok=True)
    for block in code_blocks.read(page):
        if block.mark == "model":
            shutil.copytree(MODEL, cwd / block.argument)
        if block.mark == "skip":
            assert block.argument, f"{block.location}: a skipped block says why"
        elif block.file:
            (cwd / block.file).write_text(block.text, "utf-8")
        elif block.kind == "toml":
            tomllib.loads(block.text)
        elif block.kind in ("bash", "python") and (slow or block.mark != "slow"):
            result = run(block.kind, block.text, cwd)
            details = f"{block.location}\n{block.text}\n{result['out'][-2000:]}\n{result['err'][-5000:]}"
            assert result["code"] == block.exit_code, f"exit code {result['code']}: {details}"
            if block.expected is not None:
                assert code_blocks.agrees(block.expected, result["out"]), f"it prints something else: {details}"


@pytest.mark.slow_cases(
    "README.md",
    "docs/cli.md",
    "docs/data.md",
    "docs/experiments.md",
    "docs/moe.md",
    "docs/quantization.md",
    "docs/search.md",
    "docs/serving.md",
    "docs/tpu.md",
    "docs/training.md",
    "docs/tutorials/plugin.md",
)
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_page_does_what_it_says(page, run, tmp_path):
    follow(page, run, tmp_path, slow=False)


SLOW = [p for p in PAGES if any(b.mark == "slow" for b in code_blocks.read(p))]


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=[str(p.relative_to(ROOT)) for p in SLOW])
def test_the_slow_parts_of_the_page_too(page, run, tmp_path):
    follow(page, run, tmp_path, slow=True)


NOISE = re.compile(
    r"Traceback|configuration error|[Cc][Uu][Dd][Aa]|cuDNN|libtpu|TPU_|tpu.*hostname|InitGoogle|Unable to initialize",
    re.M,
)
"""Messages of JAX and its plugins about hardware that is not there."""
PYTHON = [p for p in PAGES if any(b.kind == "python" and b.mark not in ("skip", "slow") for b in code_blocks.read(p))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=[str(p.relative_to(ROOT)) for p in PYTHON])
def test_no_hardware_that_is_absent_is_mentioned(page, run_on_any_platform, tmp_path):
    written = []

    def run(kind, text, cwd):
        answer = run_on_any_platform(kind, text, cwd)
        written.append((text, answer["stderr"]))
        return answer

    follow(page, run, tmp_path, slow=False)
    assert written
    for text, messages in written:
        assert not NOISE.search(messages), f"{text}\n{messages}"


def test_the_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert "python3 -m pip install uv && uv run axlearn train quickstart\n" in text
    assert "python3 -m pip install uv && uv run --all-packages pytest\n" in text


@pytest.mark.parametrize("page", MARKDOWN, ids=[str(p.relative_to(ROOT)) for p in MARKDOWN])
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name} links to {target}; the headings there: {sorted(slugs)}"


def commands(group: click.Group | ExtensibleCommand, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command, with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group | ExtensibleCommand):
            yield from commands(command, (*path, name))
        if not isinstance(command, click.Group):
            yield " ".join((*path, name)), command


def test_every_command_and_option_is_in_cli_md():
    from axlearn_core.cli.main import cli

    text = (ROOT / "docs/cli.md").read_text("utf-8")
    for name, command in commands(cli):
        assert f"## `axlearn {name}" in text, f"docs/cli.md has no heading for `axlearn {name}`"
        for option in (o for p in command.params if isinstance(p, click.Option) for o in p.opts if o.startswith("--")):
            assert f"`{option}" in text, f"docs/cli.md does not mention {option} of `axlearn {name}`"


def test_the_index_says_which_blocks_run():
    text = " ".join((ROOT / "docs/index.md").read_text("utf-8").split())
    assert "About 60% of these blocks run with every change. Another 20% take longer" in text
    assert "The remaining 20% are never run" in text
    marks = [b.mark for page in PAGES for b in code_blocks.read(page) if b.kind in ("bash", "python")]
    skipped, slow = (round(10 * marks.count(mark) / len(marks)) for mark in ("skip", "slow"))
    assert (10 - skipped - slow, slow, skipped) == (6, 2, 2)


def test_every_page_is_in_the_index():
    text = (ROOT / "docs/index.md").read_text("utf-8")
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md")]:
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "index.md" or f"({name})" in text, f"docs/index.md does not link to {name}"


def test_the_architecture_has_every_distribution():
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    for project in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("axlearn_*/pyproject.toml")]:
        folder = f"`{project.parent.relative_to(ROOT)}/`"
        assert folder in text, f"docs/architecture.md does not list {folder}"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [*PLUGINS, PARTS, CAPTIONS], ids=lambda plugin: plugin.name)
def test_an_example_plugin_passes_its_own_tests(plugin, tmp_path):
    flags = "" if plugin.name == "my_norm_plugin" else os.environ["XLA_FLAGS"]  # suites split arrays over eight devices
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(plugin / "tests")],
        cwd=tmp_path,
        env=environment(install(plugin, tmp_path / "site"), flags),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-4000:]
