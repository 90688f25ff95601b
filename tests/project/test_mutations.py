"""Every mutation fits the source; `make mutations` runs them, which takes long."""

from __future__ import annotations

from tools.mutations import MUTATIONS, outdated


def test_every_mutation_fits_the_source() -> None:
    assert outdated(MUTATIONS) == []
    gone = MUTATIONS[0]._replace(file="gone.py", tests="test_files.py::test_gone")
    assert len(outdated([gone])) == 2
