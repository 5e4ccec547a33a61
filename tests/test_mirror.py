"""Test files are named after the modules that they test, in folders that mirror the packages."""

import ast
import functools
import io
import re
import tokenize
import tomllib

import pytest

from support.paths import ROOT, TESTS

pytestmark = pytest.mark.style

PACKAGES = {
    "core": ROOT / "axlearn_core/src/axlearn_core",
    "testing": ROOT / "axlearn_testing/src/axlearn_testing",
    "index": ROOT / "axlearn_index/src/axlearn_index",
    **{
        f"plugins/{path.name.removeprefix('axlearn_plugins_')}": path
        for pattern in ("plugins/*/src/axlearn_plugins_*", "axlearn_plugins_*/src/axlearn_plugins_*")
        for path in ROOT.glob(pattern)
        if path.is_dir() and "." not in path.name
    },
}
"""Folder of tests -> package."""

CROSS_CUTTING = {"benchmarks", "conformance", "docs", "e2e", "fixtures", "goldens", "hostile", "support"}
"""Folders whose tests belong to no package. Those of the repository's rules are in `tests` itself."""

LARGE = 150
"""A module with this many lines of code needs tests of its own."""

TESTED_BY = {
    "axlearn_core.compose.objective": "core/train/test_objective.py",
    "axlearn_core.run.checkpoints": "core/run/test_run.py",
    "axlearn_core.run.record": "core/train/test_api_run_dir.py",
    "axlearn_plugins_finetune.lora.adapters": "plugins/finetune/lora/test_lora.py",
    "axlearn_plugins_models.gemma4.huggingface": "plugins/models/gemma4/test_gemma4.py",
    "axlearn_plugins_models.huggingface.files": "plugins/models/huggingface/test_import_export.py",
    "axlearn_plugins_serving.contracts": "plugins/serving/test_drafting.py",
    "axlearn_plugins_serving.plan.steps": "plugins/serving/plan/test_serving_plan.py",
    "axlearn_testing.objective": "testing/test_testing_suites.py",
    "axlearn_plugins_models.vit.images": "plugins/models/vit/test_vit.py",
    "axlearn_plugins_plan.remedies": "plugins/plan/test_plan.py",
    "axlearn_plugins_plan.render": "plugins/plan/test_plan.py",
    "axlearn_plugins_plan.search.estimate": "plugins/plan/search/test_search_layouts.py",
    "axlearn_plugins_plan.search.rank": "plugins/plan/search/test_search_layouts.py",
    "axlearn_plugins_plan.search.report": "plugins/plan/search/test_search_layouts.py",
    "axlearn_plugins_plan.search.trace": "plugins/plan/search/test_stages.py",
    "axlearn_plugins_quantization.library": "plugins/quantization/test_quantization.py",
    "axlearn_plugins_runtime.launch.pods": "plugins/runtime/launch/test_kubernetes.py",
    "axlearn_plugins_runtime.launch.ray_pool": "plugins/runtime/scale/test_supervision.py",
    "axlearn_plugins_runtime.local_tier": "plugins/runtime/test_tiered.py",
    "axlearn_plugins_runtime.part_transfers": "plugins/runtime/test_tiered_processes.py",
    "axlearn_plugins_runtime.scale.simulated_ray": "plugins/runtime/scale/test_supervision.py",
    "axlearn_plugins_serving.disaggregated.router": "plugins/serving/test_disaggregated.py",
    "axlearn_plugins_serving.functions": "plugins/serving/test_runner_program.py",
    "axlearn_plugins_serving.server.engine_thread": "plugins/serving/server/test_server_api.py",
    "axlearn_plugins_serving.server.limits": "plugins/serving/server/test_server_large_requests.py",
    "axlearn_plugins_serving.server.message_schemas": "plugins/serving/server/test_schemas_null_fields.py",
    "axlearn_plugins_serving.server.response_schemas": "plugins/serving/server/test_server_load.py",
    "axlearn_plugins_serving.server.responses": "plugins/serving/server/test_response_answer.py",
    "axlearn_plugins_serving.server.service": "plugins/serving/server/test_server_api.py",
    "axlearn_plugins_tools.reporting.page": "plugins/tools/reporting/test_reporting_report.py",
    "axlearn_plugins_tools.reporting.run_metrics": "plugins/tools/reporting/test_prometheus.py",
    "axlearn_plugins_tpu.kernels.splash": "plugins/tpu/test_kernels.py",
    "axlearn_plugins_transformer.functions": "plugins/transformer/test_generate.py",
    "axlearn_plugins_transformer.kernels.invariant": "plugins/cpu/kernels/test_invariant.py",
    "axlearn_plugins_transformer.paged_cache": "plugins/serving/test_cache_dtypes.py",
    "axlearn_plugins_transformer.stack_layers": "plugins/serving/test_engine_weights.py",
    "axlearn_plugins_transformer.text.chat_template": "plugins/transformer/text/test_chat_input.py",
    "axlearn_plugins_transformer.text.pipeline": "plugins/transformer/text/test_examples.py",
    "axlearn_plugins_transformer.text.records": "plugins/transformer/text/test_sources.py",
    "axlearn_plugins_verify.properties.decode": "plugins/verify/test_properties.py",
    "axlearn_plugins_verify.prove.forward": "plugins/verify/test_properties.py",
    "axlearn_testing.checkpoint": "conformance/test_parts.py",
    "axlearn_testing.kernel": "testing/test_testing_suites.py",
    "axlearn_testing.layer": "testing/test_testing_suites.py",
    "axlearn_testing.links": "testing/test_chaos.py",
    "axlearn_testing.measure": "conformance/test_slots.py",
}
"""Large module -> file with its tests, named after another module or a package. Rename or split the file to shorten this."""


def lines_of_code(text):
    """Return the number of lines with code, without comments and docstrings."""
    strings = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    docstrings = {line for n in strings for line in range(n.lineno, n.end_lineno + 1)}
    skipped = {getattr(tokenize, n) for n in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings)


def mirrored_module(name, modules, package):
    """Return the module that a test file is named after, the name of its package, or None.

    Args:
        name: Name of the test file, without folder and suffix.
        modules: Modules and packages in the mirrored package.
        package: Name of the mirrored package.
    """
    rest = name.removeprefix("test_")
    matches = [m for m in {*modules, package} if rest == m or rest.startswith(f"{m}_")]
    return max(matches, key=len, default=None)


def mirrored(path):
    """Return the package that the folder of a test file mirrors, or None if it mirrors none."""
    parts = path.relative_to(TESTS).parts[:-1]
    for length in (1, 2):
        if root := PACKAGES.get("/".join(parts[:length])):
            return root.joinpath(*parts[length:])
    return None


def _modules(folder):
    """Return the names of modules and packages in a package."""
    return {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/*.py")}


def _module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


TEST_FILES = [p for p in TESTS.rglob("test_*.py") if p.parent != TESTS]
SOURCES = {_module_name(p): p for root in PACKAGES.values() for p in root.rglob("*.py")}


@functools.cache
def _tested():
    """Return test file -> module that it is named after, or None."""
    tested = {}
    for path in TEST_FILES:
        folder = mirrored(path)
        if folder is not None:
            package = re.sub(r"^axlearn_(plugins_)?", "", folder.name)
            name = mirrored_module(path.stem, _modules(folder), package)
            package_name = _module_name(folder / "__init__.py")
            tested[path] = name and (f"{package_name}.{name}" if name in _modules(folder) else package_name)
    return tested


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("test_writer", "writer"),
        ("test_writer_faults", "writer"),
        ("test_tokamax_attention", "tokamax_attention"),
        ("test_gpu_rules", "gpu"),
        ("test_writers", None),
        ("test_faults", None),
    ],
)
def test_a_file_is_named_after_a_module(name, module):
    assert mirrored_module(name, {"writer", "tokamax", "tokamax_attention"}, "gpu") == module


def test_every_test_file_is_in_a_known_folder():
    folders = {p.relative_to(TESTS).parts[0] for p in TEST_FILES if mirrored(p) is None}
    assert folders <= CROSS_CUTTING


def test_every_test_file_is_named_after_what_it_tests():
    assert len(_tested()) > 200
    assert [str(path.relative_to(ROOT)) for path, module in _tested().items() if module is None] == []


def test_test_files_mirror_folders_that_exist():
    missing = {p.parent for p in TEST_FILES if (folder := mirrored(p)) is not None and not folder.is_dir()}
    assert missing == set()


def test_lines_of_code_are_without_comments_and_docstrings():
    assert (
        lines_of_code('"""Doc."""\n\n# a comment\nx = (\n    1,\n)  # why\ndef f():\n    """Doc."""\n    return x\n')
        == 5
    )


def test_large_modules_have_test_files():
    long = {name: text for name in SOURCES if (text := _text(name)).count("\n") >= LARGE}
    large = {name for name, text in long.items() if lines_of_code(text) >= LARGE}
    assert large - set(_tested().values()) == set(TESTED_BY), "name a test file after the module"


@functools.cache
def _entry_points():
    """Return name of a command, component, feature or experiment -> module."""
    names = {}
    for root in PACKAGES.values():
        groups = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())["project"].get("entry-points", {})
        names |= {n: target.partition(":")[0] for entries in groups.values() for n, target in entries.items()}
    return names


@functools.cache
def _text(module):
    return SOURCES[module].read_text()


@functools.cache
def _defined(module):
    """Return the names that a module defines."""
    tree = ast.parse(_text(module))
    named = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    targets = [t for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) for t in ast.walk(n)]
    return named | {t.id for t in targets if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}


@functools.cache
def _imports(path):
    """Return the modules of this repository, and of `support`, that a file imports, wherever it does.

    A name that a package only exports counts as an import of the module in the package that defines it.
    """
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imported.add(full if full in SOURCES or node.module.startswith("support") else node.module)
                if full not in SOURCES and node.module in SOURCES and SOURCES[node.module].stem == "__init__":
                    inner = [m for m in SOURCES if m.startswith(f"{node.module}.") and alias.name in _text(m)]
                    inner = [m for m in inner if alias.name in _defined(m)]
                    imported |= set(inner) if len(inner) == 1 else set()
    return imported


def _support(name):
    """Return the file of a module of `support`; `name` may end with a name in the module."""
    file = (TESTS / name.replace(".", "/")).with_suffix(".py")
    return file if file.is_file() else file.parent.with_suffix(".py")


def uses(path, module):
    """Return whether a test file imports a module, or calls it by the name of a command or a registered part.

    Modules that import the module count too, because a command is a shell around the module that does the work.
    """
    direct = _imports(path)
    files = {_support(name) for name in direct if name.startswith("support.")}
    direct = direct.union(*(_imports(file) for file in files if file.is_file()))
    text = path.read_text()
    names, words = set(re.findall(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", text)), set(re.findall(r"[a-z0-9]+", text))
    for name, target in _entry_points().items():
        if name in names or (target.endswith("command") and words.issuperset(name.split("-"))):
            direct.add(target)
    return module in direct or any(module in _imports(SOURCES[name]) for name in direct if name in SOURCES)


@pytest.mark.parametrize("module", TESTED_BY)
def test_the_file_in_the_table_tests_the_module(module):
    path = TESTS / TESTED_BY[module]
    assert module in SOURCES
    assert path.is_file()
    assert uses(path, module), f"{path} does not use {module}"


def test_a_file_that_does_not_use_a_module_is_noticed():
    path = TESTS / "core/config/test_codec.py"
    assert uses(path, "axlearn_core.config.codec")
    assert not uses(path, "axlearn_plugins_serving.server.service")
