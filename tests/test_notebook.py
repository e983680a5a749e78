"""The notebook of the examples: it runs, and its committed outputs are those of a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "library.ipynb"


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


def kinds(notebook):
    """Where there is what kind of output; what a library warns of on standard error is not ours."""
    return [
        [
            output.output_type
            for output in cell.outputs
            if output.output_type != "stream" or output.name == "stdout"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_committed_notebook_was_executed_without_errors_and_is_small(committed):
    counts = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert "error" not in [kind for cell in kinds(committed) for kind in cell]
    assert all(kinds(committed)[1:])
    assert NOTEBOOK.stat().st_size < 30_000


@pytest.mark.slow
def test_the_notebook_runs_from_events_to_a_report(committed, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    notebook = nbformat.from_dict(committed)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources=resources).execute()
    assert kinds(notebook) == kinds(committed)
    assert (tmp_path / "runs" / "notebook" / "evaluation" / "report.html").stat().st_size > 50_000
