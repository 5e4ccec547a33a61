"""Files for contributors: the changelog, the citation, the templates, the hooks of pre-commit, and what they name."""

import datetime
import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from axlearn_core.plugins.removed_names import HOOKS, NAMES
from support.paths import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
INPUTS = {"textarea", "input", "dropdown", "checkboxes"}


def load(path: Path):
    return YAML(typ="safe").load(path.read_text("utf-8"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def entries(text: str) -> list[tuple[str, str]]:
    """Return (section, entry) for each item of the changelog."""
    pairs = []
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        pairs += [(title, " ".join(item.split())) for item in re.split(r"^- ", body, flags=re.M)[1:]]
    return pairs


def test_the_changelog_has_the_sections_of_keep_a_changelog():
    versions = re.findall(r"^## \[?([^\]\n]+)\]?(?: - (.*))?$", CHANGELOG, re.M)
    assert versions[0] == ("Unreleased", "")
    for version, date in versions[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        datetime.date.fromisoformat(date)
    titles = re.findall(r"^### (.*)$", CHANGELOG, re.M)
    assert titles
    assert {title.partition(":")[0] for title in titles} <= SECTIONS


@pytest.mark.parametrize(("section", "entry"), entries(CHANGELOG), ids=lambda text: text[:30])
def test_an_entry_says_since_when_and_what_to_do(section, entry):
    if "[removed_names.py]" in entry:
        return  # the table has the replacements
    assert re.search(r"\(`[0-9a-f]{8}`[^)]*\d{4}-\d\d-\d\d\)", entry), "no commit and date"
    assert "*Migrate:*" in entry or not section.startswith(("Changed", "Removed", "Deprecated"))


def test_the_commits_in_the_changelog_exist_and_have_these_dates():
    if git("rev-parse", "--verify", "5eb2bae^{commit}").returncode:
        pytest.skip("needs the history of the repository; a shallow clone or an archive does not contain it")
    dated = re.findall(r"((?:`[0-9a-f]{8}`(?:, | and )?)+), (\d{4}-\d\d-\d\d)", CHANGELOG)
    assert len(dated) > 15
    for commits, date in dated:
        for commit in re.findall(r"[0-9a-f]{8}", commits):
            shown = git("show", "-s", "--format=%ad", "--date=format:%Y-%m-%d", commit)
            assert shown.stdout.strip() == date, f"{commit}: {shown.stdout.strip() or shown.stderr}"


def test_the_changelog_agrees_with_the_table_of_removed_names():
    hooks = [entry for section, entry in entries(CHANGELOG) if section == "Removed"]
    for hook in HOOKS:
        assert any(hook in entry for entry in hooks), f"CHANGELOG.md does not mention the removed hook {hook}"
    for name in ("axlearn_core.testing", "WEIGHT_FIRST_ROWS"):
        assert any(name in key for key in NAMES)
        assert name in CHANGELOG


def test_merged_distributions_are_gone_and_their_successors_exist():
    rows = re.findall(r"^  \| ((?:`\w+`,? ?)+) \| `(axlearn-plugins-\w+)` \|$", CHANGELOG, re.M)
    assert len(rows) == 6
    for old, new in rows:
        for name in re.findall(r"\w+", old):
            assert importlib.util.find_spec(f"axlearn_plugins_{name}") is None, name
        assert importlib.util.find_spec(new.replace("-", "_")), new


def test_the_citation_is_complete():
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["title"].startswith("axlearn-core")
    assert citation["authors"] == [{"name": "The axlearn-core authors"}]
    project = tomllib.loads((ROOT / "axlearn_core/pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    fields = {"cff-version", "message", "type", "title", "authors", "license", "keywords", "references"}
    assert set(citation) <= fields, "see the schema of the Citation File Format before you add a field"
    (paper,) = citation["references"]
    assert "arXiv:2507.05411" in [identifier["value"] for identifier in paper["identifiers"]]
    assert {"type", "title", "authors"} <= set(paper)
    assert all({"given-names", "family-names"} == set(author) for author in paper["authors"])


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(form):
    content = load(form)
    assert {"name", "description", "body"} <= set(content)
    ids = [item["id"] for item in content["body"] if item["type"] in INPUTS]
    assert len(ids) == len(set(ids)) > 0
    for item in content["body"]:
        assert item["type"] in INPUTS | {"markdown"}
        assert item["attributes"].get("value" if item["type"] == "markdown" else "label")
        assert item["type"] != "dropdown" or len(item["attributes"]["options"]) > 1
    assert any(item.get("validations", {}).get("required") for item in content["body"])


def test_there_is_a_form_for_bugs_and_one_for_features():
    assert [path.stem for path in FORMS] == ["bug", "feature"]
    assert "- [ ]" in (ROOT / ".github/pull_request_template.md").read_text("utf-8")


HOOK_LIST = [hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def run_hook(hook, *files: Path) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does: its entry, then the files."""
    return subprocess.run([*shlex.split(hook["entry"]), *map(str, files)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("hook", HOOK_LIST, ids=lambda hook: hook["id"])
def test_a_hook_uses_the_tools_of_the_workspace(hook):
    assert hook["language"] == "system", "other hooks download their tools in versions of their own"
    assert {"id", "name", "entry"} <= set(hook)
    assert hook.get("stages", ["pre-commit"])[0] in ("pre-commit", "pre-push")
    words = shlex.split(hook["entry"])
    assert words[:3] == ["uv", "run", "--no-sync"]
    assert words[3] in (ROOT / ".ci/run").read_text(), "CI does not run this tool"


@pytest.mark.parametrize("name", ["ruff-format", "ruff-check"])
def test_the_style_hooks_tell_tidy_files_from_others(name, tmp_path):
    if shutil.which("uv") is None:
        pytest.skip("needs uv on the PATH")
    (hook,) = [hook for hook in HOOK_LIST if hook["id"] == name]
    config = (ROOT / "pyproject.toml").read_text()
    tidy, untidy = '"""A module."""\n\nVALUE = 1\n', "import os\nVALUE = { 'a':1 }\n"
    (tmp_path / "pyproject.toml").write_text(config)
    results = []
    for text in (tidy, untidy):
        (file := tmp_path / "module.py").write_text(text)
        result = run_hook(hook, file)
        # A hook fails if it exits with an error or changes a file.
        results.append(result.returncode == 0 and file.read_text() == text)
    assert results == [True, False], result.stdout + result.stderr


def named_paths(text: str) -> set[str]:
    """Return the words in code that look like paths in the repository."""
    folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir() and path.name != ".venv")
    return set(re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*|[\w-]+\.(?:md|cff))(?![\w*])", text))


@pytest.mark.parametrize(
    "file",
    ["CONTRIBUTING.md", ".github/pull_request_template.md", *(str(path.relative_to(ROOT)) for path in FORMS)],
)
def test_files_that_are_named_exist(file):
    text = (ROOT / file).read_text("utf-8")
    missing = [
        path
        for path in named_paths(text)
        if not (ROOT / path.rstrip(".")).exists() and not (ROOT / "docs" / path).exists()
    ]
    assert not missing


def test_paths_are_looked_for():
    paths = named_paths(CONTRIBUTING)
    assert {"CHANGELOG.md", "tests/goldens", "plugins/rope", "docs/", ".ci/run"} & paths == {
        "CHANGELOG.md", "tests/goldens", "docs/", ".ci/run"
    }  # fmt: skip
    assert len(paths) > 20


def test_the_tests_that_are_named_exist():
    """`pytest PATH -k WORD` in CONTRIBUTING.md selects something, without collecting the tests."""
    commands = re.findall(r"pytest(?: -\S+(?: \d)?)* (tests/\S+)(?: -k (\S+))?", CONTRIBUTING)
    assert len(commands) >= 3
    for path, word in ((path.strip("`"), word.strip("`")) for path, word in commands):
        assert (ROOT / path).exists(), path
        texts = [f.read_text("utf-8") for f in [ROOT / path, *(ROOT / path).rglob("*.py")] if f.is_file()]
        assert any((word.partition(".")[0]) in text for text in texts), f"{path} -k {word}"


def test_the_readme_and_the_index_link_to_them():
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff"):
        assert f"]({name})" in readme
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"):
        assert f"](../{name})" in index


def test_the_code_of_conduct_is_the_covenant_and_names_a_contact():
    text = (ROOT / "CODE_OF_CONDUCT.md").read_text("utf-8")
    assert "https://www.contributor-covenant.org/version/2/1/code_of_conduct/" in text
    contact = "private security advisory of this repository"
    assert contact in text
    assert contact in (ROOT / "SECURITY.md").read_text("utf-8"), "one way to reach the maintainers in private"
