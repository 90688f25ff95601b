"""`python docs/run_notebook.py`: runs ladder.ipynb in an empty folder, and saves what it showed."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent / "ladder.ipynb"
PARAMETERS = "STEPS = 600"
"""The line that says how long it takes; a test makes it shorter."""


def main() -> None:
    """Writes the notebook with new outputs."""
    import nbformat

    notebook = read()
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
        "attnlm": {"outputs_of": code_hash(notebook)},
    }
    nbformat.write(notebook, NOTEBOOK)


def read() -> Any:
    """The notebook as it is saved."""
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook: Any, folder: Path) -> None:
    """Runs all cells in a kernel of their own, whose folder this is; outputs are replaced.

    Raises CellExecutionError where a cell fails.
    """
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, resources=place, record_timing=False).execute()


def code_hash(notebook: Any) -> str:
    """Of all its code: outputs that were saved with another hash are stale."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


if __name__ == "__main__":
    main()
