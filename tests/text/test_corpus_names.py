"""The built-in names."""

from __future__ import annotations

from pathlib import Path

import attnlm
from attnlm.text import corpus_names


def test_names_are_the_same_everywhere_and_none_appears_twice(tmp_path: Path) -> None:
    text = corpus_names.generate_names()
    lines = text.splitlines()
    assert len(set(lines)) == len(lines) == corpus_names.COUNT and text.endswith("\n")
    assert all(line.isalpha() and line.islower() and len(line) > 1 for line in lines)
    dataset = attnlm.prepare("names", data_dir=tmp_path)
    assert dataset.source_sha256 == (
        "1a0779492a28c920c3c429df03d6b374fdccb2eb2bd331be54a5b23eedd144ba"
    )
