"""Every route from text to tokens agrees with `transformers`, for each fact about a model's text."""

import pytest

from support.needs import needs
from support.text_matrix import matrix
from support.text_matrix.models import FAMILIES
from support.text_matrix.routes import DPO, Evaluation, Harness, Training
from support.text_matrix.served import ROUTES, Load

QUICK = (Training, DPO, Evaluation, Harness, Load)


def wrong(cells):
    return [(cell.fact, cell.route, cell.detail) for cell in cells if cell.status == "wrong"]


@pytest.mark.slow
@needs("torch", "transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_route_agrees_with_transformers(family):
    cells = matrix.family_cells(family)
    assert wrong(cells) == []
    applicable = [cell for cell in cells if cell.status != "not applicable"]
    assert len(applicable) >= 0.8 * len(cells)
    assert all(cell.detail for cell in cells if cell.status in ("not applicable", "deliberate"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_route_agrees_with_stored_values(tmp_path):
    assert wrong(matrix.stored_cells(tmp_path, ROUTES)) == []


@pytest.mark.slow
def test_some_routes_agree_with_stored_values(tmp_path):
    cells = matrix.stored_cells(tmp_path, QUICK, write=False)
    assert wrong(cells) == []
    assert len(cells) == len(QUICK) * len(matrix.FACTS)


def test_the_table_counts_cells_and_names_what_is_wrong():
    cells = [
        matrix.Cell("BOS", "training", "equal"),
        matrix.Cell("BOS", "DPO", "wrong", "got [1], expected [2]"),
        matrix.Cell("date", "DPO", "not applicable", "no messages"),
    ]
    table = matrix.report({"llama3": cells})
    assert "1 families, 3 cells: 2 apply (67%)" in table
    assert "X wrong: 1" in table
    assert "wrong: llama3, BOS, DPO: got [1], expected [2]" in table
    assert "not applicable: no messages (1)" in table
