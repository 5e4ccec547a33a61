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
