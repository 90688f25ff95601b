"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings as examples

from tests.browser import launched, open_until_the_end
from tests.kit import Clock
from tests.web_server import WebServer, serving

# Neither the pace of the machine nor chance decides whether a property test passes.
examples.register_profile("steady", deadline=None, derandomize=True)
examples.load_profile("steady")
# The models of the tests are so small that a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test has two threads, they would spin for each other beside the other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What most tests expect is what a CPU computes. Set before torch is loaded, for new processes too.
if not os.environ.get("ATTNLM_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if sys.platform == "darwin":
    import torch

    torch.backends.mps.is_available = lambda: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the variants that show no value of a part that others do not, and what a browser shows.

    The longest tests come first, so that no worker ends with them.
    """
    from tests.models import MORE_VARIANTS

    for item in items:
        of_case = getattr(item, "callspec", None)
        if of_case and not MORE_VARIANTS.isdisjoint(map(str, of_case.params.values())):
            item.add_marker("variants")
        if "browser" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("smoke"):
            item.add_marker("pages")
    longest = ("test_processes", "test_documents")
    items.sort(key=lambda item: item.path.stem not in longest)


@pytest.fixture(scope="session", autouse=True)
def _quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No pictures of curves, which take longer to draw than most tests take to train, and no
    waiting for the disk; test_curves.py and test_compare.py draw them, and test_files.py sees
    that files are flushed. Snapshots have
    few tokens, except with `whole_snapshots`. The list of accepted code is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLM_CONFIG_DIR", str(tmp_path_factory.mktemp("config")))
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("attnlm.see.curves.draw_run", lambda run, path: path.touch())
        patch.setattr("attnlm.see.comparison.picture", lambda *_, **__: b"")
        patch.setattr("attnlm.workflows.evaluate._SAMPLED_TOKENS", 8)
        patch.setattr("attnlm.see.head_scores._SNAPSHOT_TOKENS", 24)
        yield


@pytest.fixture
def whole_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots as users get them: 80 sampled tokens, and scores from 256."""
    monkeypatch.setattr("attnlm.workflows.evaluate._SAMPLED_TOKENS", 80)
    monkeypatch.setattr("attnlm.see.head_scores._SNAPSHOT_TOKENS", 256)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes only when a test says so."""
    return Clock(monkeypatch)


@pytest.fixture
def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A millisecond passes each time that somebody looks."""
    return Clock(monkeypatch, tick=1e-3)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small data set, of tests.models' FRUITS."""
    import attnlm
    from tests.models import FRUITS

    folder = tmp_path_factory.mktemp("data")
    (folder / "fruits.txt").write_text(FRUITS)
    return attnlm.prepare(folder / "fruits.txt", data_dir=folder / "data")


@pytest.fixture(scope="module")
def project(dataset: Any) -> Path:
    """The folder that a user would be in, with the small data set in data/."""
    folder: Path = dataset.path.parent.parent
    return folder


@pytest.fixture
def gpt2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """GPT-2's vocabulary, from a folder with tiktoken's files."""
    from attnlm.tokens.tokenizer import load_published

    data = os.environ.get("ATTNLM_TEST_DATA")
    if not data:
        pytest.skip("ATTNLM_TEST_DATA names no folder with tiktoken's files")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(data) / "tiktoken"))
    return load_published("gpt2", spool=tmp_path, offline=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, with GPT-2's vocabulary if it is available."""
    monkeypatch.chdir(tmp_path)
    if "ATTNLM_TEST_DATA" in os.environ:
        folder = Path(os.environ["ATTNLM_TEST_DATA"]) / "tiktoken"
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    return tmp_path


@pytest.fixture(scope="module")
def few_tales() -> Iterator[str]:
    """Makes the built-in corpus begin as it does and end soon."""
    from attnlm.text import corpus_tales

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_tales, "MINIMUM_CHARACTERS", 20_000)
        patch.setattr(corpus_tales, "SHA256", mock.ANY)
        yield corpus_tales.generate_tales()[0]


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts and models of tests.own_code."""
    from tests import own_code

    return own_code.written(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    yield from launched()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page, its file or its content, which must log and request nothing until the end."""
    yield from open_until_the_end(browser, tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set and a short run of each rung, and of some with more parts."""
    import attnlm
    from attnlm.config.variants import variant
    from attnlm.model.architecture import RUNGS

    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    dataset = attnlm.prepare(str(folder / "text.txt"), data_dir=folder / "data", name="foxes")
    models = {rung: rung for rung in RUNGS}
    models["projected"] = "multi-head:projection=true:qkv_bias=true"
    models["tied"] = "transformer:tie_embeddings=true"
    # What does not apply to a model is left out of a recipe.
    recipe = {"embed_dim": 16, "heads": 2, "layers": 2, "block_size": 16, "batch_size": 4}
    for name, model in models.items():
        settings: dict[str, Any] = {**variant(model)}
        attnlm.train(
            dataset.path,
            name=name,
            checkpoint_dir=folder / "checkpoints",
            recipe={**recipe, "steps": 30, "seed": 1, "threads": 1},
            **settings,
        )
    return folder
