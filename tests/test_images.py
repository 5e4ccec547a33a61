"""Container images: rules of the Dockerfile, the files that a build reads, the images that the documentation names.

No test needs Docker. A slow test runs the commands of the CPU image in a temporary directory.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.paths import ROOT

VERSION = tomllib.loads((ROOT / "axlearn_core/pyproject.toml").read_text())["project"]["version"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
IMAGE = re.compile(r"(?:image[=:]\s?|docker run [^\n]*? |docker push |-t )((?:[\w./-]+/)?axlearn(?::[\w.-]+)?)(?=\s|$)")
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL", "STOPSIGNAL",
    "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


@dataclass
class Stage:
    """A stage of a Dockerfile: its base, its name, and its instructions as (name, arguments)."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


def read_dockerfile(text: str) -> list[Stage]:
    """Parse comments, continued lines, and stages."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        assert name in INSTRUCTIONS, f"unknown instruction: {line}"
        if name == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", value.strip()).groups()
            stages.append(Stage(base, name))
        else:
            stages[-1].instructions.append((name, value.strip()))
    return stages


STAGES = read_dockerfile((ROOT / "Dockerfile").read_text())
BY_NAME = {stage.name: stage for stage in STAGES}
TARGETS = ("cpu", "cuda", "tpu")


def chain(name: str) -> list[Stage]:
    """Return a stage and the stages that it is based on, the oldest first."""
    stage = BY_NAME[name]
    return [*(chain(stage.base) if stage.base in BY_NAME else []), stage]


def values(name: str, instruction: str) -> list[str]:
    return [value for stage in chain(name) for value in stage.values(instruction)]


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Apply the rules of `.dockerignore`. The last pattern that matches the path or a folder above it wins."""
    ignored = False
    parts = path.split("/")
    above = ["/".join(parts[:size]) for size in range(1, len(parts) + 1)]
    for pattern in patterns:
        glob = re.escape(pattern.removeprefix("!").strip("/"))
        regex = glob.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        if any(re.fullmatch(regex, part) for part in above):
            ignored = not pattern.startswith("!")
    return ignored


PATTERNS = [
    line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip() and line[0] != "#"
]


def context_files() -> list[str]:
    """Return the files in git that a build reads, as paths in the repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listing.split("\0") if name and (ROOT / name).is_file()]
    return [name for name in files if not is_ignored(name, PATTERNS)]


def test_a_dockerfile_is_parsed():
    first, second = read_dockerfile(
        "# a comment\nFROM a:1 AS x\nRUN one \\\n  # inside\n  && two\n\nFROM x AS y\nUSER 1\n"
    )
    assert (first.base, first.name, first.values("RUN")) == ("a:1", "x", ["one    && two"])
    assert (second.base, second.values("USER")) == ("x", ["1"])
    with pytest.raises(AssertionError, match="unknown instruction"):
        read_dockerfile("FROM a:1 AS x\nRUM one\n")


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("docs/cli.md", True),
        ("axlearn_core/src/axlearn_core/__init__.py", False),
        ("plugins/rope/pyproject.toml", False),
        ("plugins/rope/src/x/__pycache__/y.pyc", True),
        ("axlearn_plugins_cpu/src/axlearn_plugins_cpu/library.so", True),
        ("uv.lock", True),
        ("pyproject.toml", False),
        (".venv/pyproject.toml", True),
    ],
)
def test_the_files_that_a_build_ignores(path, ignored):
    assert is_ignored(path, PATTERNS) == ignored


def test_the_build_reads_every_distribution_and_no_tests():
    files = context_files()
    folders = [*ROOT.glob("axlearn_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    assert {str(path.relative_to(ROOT)) for path in folders} <= set(files)
    assert not [name for name in files if name.startswith(("tests/", "docs/", "benchmarks/", "examples/", "."))]


def test_bases_are_pinned_and_of_one_python():
    bases = [stage.base for stage in STAGES if stage.base not in BY_NAME]
    assert bases, "the Dockerfile has no base"
    versions = set()
    for base in bases:
        tag = base.partition(":")[2]
        assert tag, f"{base} has no tag"
        assert tag != "latest"
        versions.add(re.match(r"3\.\d+-", tag)[0])  # Python's minor version; and Debian's name
        assert re.search(r"-(bookworm|trixie)$", tag), f"{base} names no Debian release"
    assert len(versions) == 1, f"an environment of one Python does not work with another: {versions}"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_files_that_are_copied_exist(stage):
    position = STAGES.index(stage)
    for value in stage.values("COPY"):
        *options, source, target = shlex.split(value)
        assert target
        if not options:
            files = [name for name in context_files() if source == "." or name.startswith(source.rstrip("/"))]
            assert files, f"COPY {value}: .dockerignore leaves out all of it, or it does not exist"
            continue
        (option,) = options
        origin = option.removeprefix("--from=")
        assert origin in [earlier.name for earlier in STAGES[:position]], (
            f"COPY {value}: no stage before it has this name"
        )
    assert not stage.values("ADD"), "ADD also downloads and unpacks; use COPY"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_commands_install_folders_of_this_repository(stage):
    for command in stage.values("RUN"):
        assert not re.search(r"\b(sudo|curl|wget|git clone|apt-get)\b", command), command
        for word in shlex.split(command):
            if word.startswith("./"):
                folder = word.partition("[")[0]
                assert list(ROOT.glob(f"{folder}/pyproject.toml")), f"{word} in: {command}"
            assert not word.startswith("axlearn-"), f"{word}: not published; install the folder"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_starts_axlearn_as_a_user_without_rights(target):
    user = values(target, "USER")[-1]
    assert user == ("root" if target == "tpu" else "1000:1000")
    assert json.loads(values(target, "ENTRYPOINT")[-1]) == ["axlearn"]
    assert "PATH=/opt/axlearn/bin:$PATH" in values(target, "ENV")[0]
    assert f"--from=build-{target} /opt/axlearn /opt/axlearn" in values(target, "COPY")
    assert "uv pip install" in " ".join(BY_NAME[f"build-{target}"].values("RUN"))


def test_the_default_image_is_for_cpus():
    assert STAGES[-1].name == "cpu"


def test_tools_are_pinned():
    commands = [command for stage in STAGES for command in stage.values("RUN")]
    installs = [word for c in commands if "-m pip install" in c for word in shlex.split(c)[4:] if word[0] != "-"]
    assert installs
    assert all("==" in word for word in installs), installs


def named_images() -> list[tuple[str, str]]:
    """Return (place, image) for each image of this repository that a page or the Dockerfile names."""
    return [
        (path.name, image) for path in (*PAGES, ROOT / "Dockerfile") for image in IMAGE.findall(path.read_text("utf-8"))
    ]


def test_pages_name_images_that_the_dockerfile_builds():
    images = named_images()
    assert {"launch.md", "serving.md", "Dockerfile"} <= {place for place, _ in images}
    tags = {VERSION} | {f"{VERSION}-{target}" for target in TARGETS if target != "cpu"}
    assert [(place, image) for place, image in images if image.partition(":")[2] not in tags] == []


def test_the_pages_that_start_images_link_to_how_to_build_them():
    assert "## Images" in (ROOT / "docs/launch.md").read_text("utf-8")
    assert "](launch.md#images)" in (ROOT / "docs/serving.md").read_text("utf-8")


OFFLINE = re.compile(
    r"NewConnectionError|failure in name resolution|Name or service not known|dns error|client error \(Connect\)"
)


def run_shell(command: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the Dockerfile. Skip the test if it cannot reach a package index. Any other failure is an error."""
    result = subprocess.run(["sh", "-ec", command], cwd=folder, env=env, capture_output=True, text=True)
    if result.returncode and OFFLINE.search(result.stdout + result.stderr):
        pytest.skip("needs a package index")
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result


def copy_context(folder: Path) -> None:
    """Copy the files that a build reads."""
    for name in context_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


@dataclass
class Machine:
    """Runs the instructions of a stage with the root of the file system in a temporary folder."""

    root: Path
    folder: Path
    env: dict[str, str]

    def moved(self, text: str) -> str:
        """Move absolute paths below the root."""
        return re.sub(r"(?<![\w./$:-])/(?=(?:opt|src|home)\b)", f"{self.root}/", text)

    def run(self, name: str, value: str) -> None:
        if name == "ENV":
            for word in shlex.split(value):
                variable, _, text = word.partition("=")
                self.env[variable] = self.moved(text).replace("$PATH", self.env["PATH"])
                assert "$" not in self.env[variable], f"ENV {value}: this test only expands $PATH"
        elif name == "ARG":
            variable, _, text = value.partition("=")
            self.env.setdefault(variable, text.strip('"'))
        elif name == "WORKDIR":
            self.folder = Path(self.moved(value))
            self.folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY" and "--from" not in value:
            copy_context(self.folder)
        elif name == "RUN":
            command = self.moved(value).replace("useradd ", f"useradd --prefix {self.root} ")
            run_shell(command, self.folder, self.env)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "packages"), [("cuda", {"jax-cuda12-plugin", "tokamax"}), ("tpu", {"libtpu"})])
def test_the_requirements_of_an_accelerator_image_resolve(target, packages, tmp_path):
    if shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH")
    env = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "empty"), "PACKAGES": "axlearn-plugins-runtime[ray]"}
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, env["VIRTUAL_ENV"]], check=True)
    (command,) = BY_NAME[f"build-{target}"].values("RUN")
    command = command.replace("uv pip install", "uv pip install --dry-run --no-editable")
    names = set(re.findall(r"^ \+ ([\w-]+)(?:==| @ )", run_shell(command, ROOT, env).stderr, re.M))
    assert packages | {"ray", "axlearn-core", f"axlearn-plugins-{'gpu' if target == 'cuda' else target}"} <= names


@pytest.fixture
def temporary_root(tmp_path):
    """A folder for an environment of a gigabyte, which pytest would keep."""
    yield tmp_path / "root"
    shutil.rmtree(tmp_path / "root", ignore_errors=True)


@pytest.mark.slow
def test_the_commands_of_the_cpu_image_install_what_its_entry_point_needs(temporary_root):
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, as the base image of the build has")
    root = temporary_root
    (root / "etc").mkdir(parents=True)
    for name in ("passwd", "group", "shadow", "gshadow"):
        (root / "etc" / name).touch()
    python = (
        subprocess.run(  # the interpreter of the base image: without the environment of the tests, and without pip's
            [sys.executable, "-m", "venv", str(root / "usr")], check=True, capture_output=True
        )
    )
    assert python.returncode == 0
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT"}
    env = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("XLA_FLAGS")}
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache/uv")
    env |= {"PATH": f"{root}/usr/bin:{env['PATH']}", "HOME": str(root), "UV_CACHE_DIR": cache}
    machine = Machine(root, root, env)
    may_add_users = os.geteuid() == 0 and shutil.which("useradd") is not None
    for stage in [*chain("build-cpu"), *chain("cpu")]:
        for name, value in stage.instructions:
            if value.startswith("useradd") and not may_add_users:
                continue
            machine.run(name, value)
    if may_add_users:
        assert (root / "etc/passwd").read_text().split(":")[:4] == ["axlearn", "x", "1000", "1000"]
    words = [*json.loads(values("cpu", "ENTRYPOINT")[-1]), *json.loads(values("cpu", "CMD")[-1])]
    home = machine.folder
    listing = subprocess.run(words, cwd=home, env=machine.env, capture_output=True, text=True, check=True)
    assert "serve" in listing.stdout
    assert shutil.which("axlearn", path=machine.env["PATH"]).startswith(str(root / "opt/axlearn"))
    shutil.rmtree(root / "src")  # the image does not contain it
    for command in (["plugins", "doctor"], ["train", "quickstart", "--dry-run", "--run-dir", "run"]):
        subprocess.run(["axlearn", *command], cwd=home, env=machine.env, check=True)
    code = "import axlearn_plugins_cpu, pathlib; print(pathlib.Path(axlearn_plugins_cpu.__file__).parent)"
    library = subprocess.run(
        ["python", "-c", code], cwd=home, env=machine.env, capture_output=True, text=True, check=True
    )
    assert list(Path(library.stdout.strip()).rglob("*.so")), "the kernels for CPUs were not compiled"
    packages = subprocess.run(
        ["uv", "pip", "list", "--format", "json"], cwd=home, env=machine.env, capture_output=True, text=True, check=True
    )
    names = {package["name"] for package in json.loads(packages.stdout)}
    assert "jax" in names
    assert not {"libtpu", "jax-cuda12-plugin", "pytest"} & names, "the image for CPUs stays small"
