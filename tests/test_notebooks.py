"""Every notebook runs from top to bottom."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_notebook_runs_from_top_to_bottom(path, tmp_path):
    # Here, so that the fast tests need no notebook packages.
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    # Cells tagged "skip-execution" (the one that installs the package on Colab) are passed over.
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
