"""The notebook runs from its first cell to its last, in a folder of its own, and shows what it says."""

import os
import re

import pytest

from support.paths import ROOT

NOTEBOOK = ROOT / "examples/quickstart.ipynb"


def test_it_is_kept_without_outputs():
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\((\.\.[^)]+)\)", NOTEBOOK.read_text("utf-8")):
        assert (NOTEBOOK.parent / target).is_file(), target


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
def test_every_cell_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS_OF_ONE_DEVICE", ""))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 2
    assert "TanhNorm" in texts
    assert "fits" in texts
    assert "def " in texts
    assert (tmp_path / "runs/notebook/config.yaml").is_file()


SMALL = (
    'small = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "input.batch_size": 2,'
    ' "input.sequence_length": 32, "evaluators": {}}\n'
)
CELLS = {
    "config": f'import axlearn_core as ax\n{SMALL}config = ax.resolve("quickstart", set=small).config\nconfig',
    "train": "result = ax.train(config, steps=20)\nresult",
    "load": "loaded = ax.load(result.run_dir)\nloaded",
    "layer": "from flax import nnx\nnnx.display(loaded.model.decoder.norm)",
    "diff": 'ax.diff(config, ax.patch(config, {"seed": 7}))',
    "error": 'ax.resolve("quikstart")',
    "traceback": "%tb",
    "report": "from axlearn_plugins_tools.reporting import Report\nReport.read(result.run_dir)",
    "plan": "from axlearn_plugins_plan.plan import make_plan\n"
    'make_plan(ax.resolve("quickstart", set=small, target="cpu-1"))',
}
"""Cells by the name of their test."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
def test_objects_progress_and_errors_in_a_notebook(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS_OF_ONE_DEVICE", ""))
    monkeypatch.delenv("JAX_PLATFORMS")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS.values()])
    options = {"timeout": 600, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(notebook, allow_errors=True, **options).execute()
    outputs = dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))
    plain = {
        name: "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell)
        for name, cell in outputs.items()
    }
    html = {name: "".join(o.get("data", {}).get("text/html", "") for o in cell) for name, cell in outputs.items()}
    for name in ("config", "diff", "report", "plan"):
        assert html[name].count("<details") >= 1, name
    assert plain["config"].startswith("Trainer.Config\n  name: 'quickstart'\n")
    assert "step 20/20  loss" in plain["train"]
    assert '<progress value="20" max="20"' in html["train"]
    assert re.search(r"Result\(runs/quickstart-[0-9a-f]{8}, step 20, loss \d", plain["train"])
    assert re.fullmatch(r"LoadedModel\(quickstart, step 20, [\d,]+ parameters, TokenizerJson\)", plain["load"])
    assert "treescope" in html["layer"]
    assert re.fullmatch(r"<quickstart on cpu-1: 1 chip, [\d,]+ parameters; fits: \S+ MiB of \S+ GiB>", plain["plan"])
    (error,), (traceback,) = outputs["error"], outputs["traceback"]
    assert error.traceback[0] == "RequestError: unknown experiment 'quikstart'"
    assert "resolve.py" not in "".join(error.traceback)
    assert "resolve.py" in "".join(traceback.traceback)
    messages = "".join(o.text for cell in outputs.values() for o in cell if o.get("name") == "stderr")
    assert not re.search("CUDA|TPU_|Traceback", messages), messages
