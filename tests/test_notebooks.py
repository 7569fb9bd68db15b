"""Every notebook runs from top to bottom, and is fit to be opened elsewhere."""

import json
from pathlib import Path

import pytest

from hf_prefix_cache.packaged_model import packaged_model_available

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]
# Cells with this tag (the one that installs the package on Colab) are passed over here.
SKIPPED = "skip-execution"


@pytest.mark.notebook
@pytest.mark.skipif(not packaged_model_available(), reason="the packaged real model is not installed")
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_notebook_runs_from_top_to_bottom(path, tmp_path):
    # Here, so that the fast tests need no notebook packages.
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, skip_cells_with_tag=SKIPPED, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_notebook_begins_with_a_colab_badge_and_one_install_cell(path):
    first, *rest = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert (
        f"colab.research.google.com/github/hf-prefix-cache/hf-prefix-cache/blob/main/notebooks/{path.name}"
        in "".join(first["source"])
    )
    installs = [cell for cell in rest if "pip install" in "".join(cell["source"])]
    assert installs == rest[:1]
    assert SKIPPED in installs[0]["metadata"]["tags"]


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_notebook_is_small_and_was_committed_without_warnings_and_errors(path):
    assert path.stat().st_size < 400_000
    outputs = [
        output for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] for output in cell.get("outputs", [])
    ]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
