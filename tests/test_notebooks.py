"""The notebooks run from top to bottom as a reader runs them, and are kept with their outputs."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "02_staleness"
# What they run is run by tests/scripts, tests/episodes and tests/recipes too.
REPEATS = ("04_your_reward_and_dataset", "06_agents", "07_vision")
INDEX = (FOLDER / "README.md").read_text()


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def marks_of(path: Path) -> list:
    return [] if path.stem == QUICK else [pytest.mark.slow if path.stem in REPEATS else pytest.mark.long]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=marks_of(path)) for path in NOTEBOOKS])
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"^STEPS = \d+", "STEPS = 2", cell.source, flags=re.MULTILINE)
        cell.source = cell.source.replace('"../outputs/', f'"{tmp_path}/')
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_the_library_is_there(path):
    lines = (line for cell in code_cells(path) for line in "".join(cell["source"]).splitlines())
    imports = [line for line in lines if re.match(r"(from|import) trl_a3po", line)]
    assert imports
    exec("\n".join(imports), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_its_outputs(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})}
    assert "image/png" in kinds
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_nothing_of_the_machine_it_ran_on(path):
    assert str(Path.home()) not in path.read_text() and "/tmp/" not in path.read_text()


def test_the_index_lists_the_notebooks_in_reading_order():
    assert re.findall(r"\((\w+\.ipynb)\)", INDEX) == [path.name for path in NOTEBOOKS]
