"""Ladders that several files of tests look at, each trained once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.data.dataset import Dataset
from attnlm.see.comparison import Comparison
from tests.models import prepared

HEAD = "multi-head:attention={}/parts.py:Head:embed_dim=8:heads=2"
EQUAL = ("bigram", "single-head", "average:embed_dim=32")
LADDERS: dict[str, dict[str, Any]] = {
    "plain": {"rungs": ("bigram", "single-head")},
    "own": {"rungs": ("bigram", HEAD)},
    "tuned": {
        "rungs": ("bigram", "single-head", "average:learning_rate=0.02"),
        "steps": 10,
        "tune": True,
    },
    "equal parameters": {"rungs": EQUAL, "equal": "parameters"},
}


class Ladders:
    """Trains ladders on a small text; `whole` trains each of LADDERS once."""

    def __init__(self, folder: Path, code: Path) -> None:
        self.folder, self.code, self.dataset = folder, code, prepared(folder)

    def train(
        self, folder: Path, kind: str = "plain", data: Dataset | None = None, **given: Any
    ) -> Comparison:
        settings: dict[str, Any] = {"steps": 6, "eval_every": 2, "seed": 1, "prompt": "1 "}
        settings |= {"tokens": 20, "checkpoint_dir": folder, **LADDERS[kind], **given}
        settings["rungs"] = [rung.format(self.code) for rung in settings["rungs"]]
        return attnlm.ladder(data or self.dataset, **settings)

    @functools.cache  # noqa: B019
    def whole(self, kind: str) -> Comparison:
        return self.train(self.folder / "runs", kind, name=kind.replace(" ", "-"))


@pytest.fixture(scope="session")
def ladders(tmp_path_factory: pytest.TempPathFactory, code: Path) -> Ladders:
    return Ladders(tmp_path_factory.mktemp("ladders"), code)


@pytest.fixture
def climbed(ladders: Ladders) -> Comparison:
    """A ladder of a bigram and a single head."""
    return ladders.whole("plain")
