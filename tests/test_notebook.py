"""docs/notebook.ipynb, run from first cell to last in a folder of its own, with a real kernel and a real Ray."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fedcommons import load_runs

PAGE = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


@pytest.mark.ray
def test_the_notebook_runs(tmp_path: Path) -> None:
    book = nbformat.read(PAGE, as_version=4)
    client = NotebookClient(book, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert len(load_runs(tmp_path / "notebook-runs" / "sweep")) == 4
    assert (tmp_path / "notebook-runs" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    said = [out for cell in book.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
    assert not said


def test_what_the_notebook_shows_was_left_by_it() -> None:
    """Every code cell was run, in order, and none failed."""
    cells = [cell for cell in nbformat.read(PAGE, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
