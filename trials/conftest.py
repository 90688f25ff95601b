"""The seed and number of the cases, and what they share.

The process of pytest only loads modules and forks: where a thread runs, nobody may fork. What
computes is called with `in_child`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}

import matplotlib.figure  # noqa: F401 - once for all children

import attnlm
from attnlm.base.files import write_bytes
from attnlm.see import curves
from trials.kit import in_child, make_project

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*"]  # forks, /proc, limits
_LOADED = [getattr(attnlm, name) for name in attnlm.__all__]


def pytest_addoption(parser: pytest.Parser) -> None:
    today = int(f"{datetime.now(UTC):%Y%m%d}")
    parser.addoption("--seed", type=int, default=today, help="of all cases; default: the day")
    parser.addoption("--cases", type=int, default=sys.maxsize, help="of each test; default: all")


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep as many cases of each test as are wanted, others with each seed."""
    gc.freeze()  # else each child takes a second to copy what is looked at for collection
    tried: Counter[str] = Counter()
    left_out = set()
    for item in Random(config.option.seed).sample(items, len(items)):
        test = item.nodeid.partition("[")[0]
        tried[test] += 1
        if tried[test] > config.option.cases:
            left_out.add(item)
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> Random:
    """The generator of one case, which depends on the seed, the test and the case alone."""
    print("to repeat it: --seed", request.config.option.seed)
    return Random(f"{request.config.option.seed} {request.node.name}")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder for one case, which leaves neither files nor children."""
    (made := tmp_path_factory.getbasetemp() / "case").mkdir()
    yield made
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.kill()
            child.join()
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two data sets and a run, and two recipes."""
    folder = tmp_path_factory.mktemp("project")
    in_child(make_project, folder)
    return folder


@pytest.fixture
def project_copy(project: Path, place: Path) -> Path:
    """A copy of the project that a case may damage."""
    return Path(shutil.copytree(project, place / "project"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve takes longer than a run."""
    monkeypatch.setattr(curves, "draw_run", lambda run, path: write_bytes(path, b"a curve"))
