"""The fastest of several ways is measured once on a machine, and remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnlm.compute import choices
from attnlm.compute.choices import fastest, remembered_choices
from attnlm.model.architecture import architecture
from attnlm.model.ops import Kernels, kernels_in_use
from attnlm.model.ops.attention import attention_in_c
from attnlm.model.ops.linear import onednn_linear
from attnlm.training import kernels
from attnlm.training.kernels import faster_attention, faster_matmul
from tests.clock import Clock


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(choices, "_SECONDS", 0.0)
    monkeypatch.setattr(time, "sleep", Clock(monkeypatch).advance)
    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "choices.json"


class Ways:
    """Ways that take as long as told."""

    def __init__(self, **seconds: float) -> None:
        self.made = 0
        self.ways = {name: self._way(took) for name, took in seconds.items()}

    def _way(self, seconds: float) -> Callable[[], None]:
        def way() -> None:
            torch.set_num_threads(1)  # as steps of divided batches do
            self.made += 1
            time.sleep(seconds)  # of the clock above

        return way


def test_the_fastest_way_is_chosen_and_remembered(cache: Path) -> None:
    slow, fast = Ways(one=0.02, other=0.001), Ways(one=0.001, other=0.02)
    assert fastest("kind", "slow", slow.ways) == "other"
    assert fastest("kind", "fast", fast.ways) == "one"
    for sizes, expected in (("slow", "other"), ("fast", "one")):
        again = Ways(one=0, other=0)
        assert fastest("kind", sizes, again.ways) == expected
        assert again.made == 0
    found = [(choice.kind, choice.sizes, choice.chosen) for choice in remembered_choices()]
    assert found == [("kind", "slow", "other"), ("kind", "fast", "one")]
    assert remembered_choices()[0].milliseconds == pytest.approx({"one": 20.0, "other": 1.0})


@pytest.mark.parametrize("change", ["kind", "sizes", "about", "ways", "processor"])
def test_another_question_or_processor_is_measured_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"kind": "kind", "sizes": "sizes", "about": ["about"]}
    fastest(asked["kind"], asked["sizes"], Ways(one=1, other=2).ways, about=asked["about"])  # type: ignore[arg-type]
    again = Ways(**({"one": 2, "third": 1} if change == "ways" else {"one": 2, "other": 1}))
    if change == "processor":
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    elif change != "ways":
        asked[change] = "new"
    fastest(asked["kind"], asked["sizes"], again.ways, about=asked["about"])  # type: ignore[arg-type]
    assert again.made > 0


def test_a_way_that_is_far_slower_is_timed_once() -> None:
    slow, fast = Ways(slow=1.0), Ways(fast=0.001)
    assert fastest("kind", "far apart", {**slow.ways, **fast.ways}) == "fast"
    assert slow.made == 2 and fast.made == 2 * choices._ROUNDS  # after a call that is not timed


def test_a_way_must_save_what_it_is_worth() -> None:
    assert fastest("kind", "even", Ways(one=0.005, other=0.005).ways) == "one"
    assert fastest("kind", "close", Ways(one=0.01, other=0.0095).ways, worth=0.1) == "one"
    assert fastest("kind", "far", Ways(one=0.01, other=0.0085).ways, worth=0.1) == "other"


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"choices": 3}', '{"choices": {"a": "b"}}', '{"choices": {"a": {"kind": 1}}}'],
)
def test_a_damaged_memory_is_made_anew(content: str, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert fastest("kind", "sizes", Ways(one=0.001, other=0.02).ways) == "one"
    again = Ways(one=0, other=0)
    assert fastest("kind", "sizes", again.ways) == "one"
    assert again.made == 0


def test_a_cache_that_cannot_be_written_costs_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLM_CACHE_DIR", "/dev/null/nowhere")
    for _ in range(2):
        ways = Ways(one=0.001, other=0.02)
        assert fastest("kind", "sizes", ways.ways) == "one"
        assert ways.made > 0


def test_only_the_newest_choices_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_MOST_REMEMBERED", 3)
    for number in range(5):
        fastest("kind", str(number), Ways(one=0.001, other=0.02).ways)
    assert [choice.sizes for choice in remembered_choices()] == ["2", "3", "4"]
    assert len(json.loads(cache.read_text())["choices"]) == 3


def _slowed(name: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one kernel of `kernels` slow."""
    compute = getattr(kernels, name)
    field = {"product": "matmul", "fused_attention": "attention"}[name]

    def slowed(*arguments: object) -> object:
        time.sleep(1.0 if getattr(kernels_in_use(), field) == slow else 0.001)
        return compute(*arguments)

    monkeypatch.setattr(kernels, name, slowed)


@pytest.mark.parametrize("slow", ["blas", "onednn"])
def test_matmuls_take_the_library_that_is_faster(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if onednn_linear() is None:
        pytest.skip("PyTorch has no oneDNN here")
    _slowed("product", slow, monkeypatch)
    a = architecture("gpt2", {"embed_dim": 128})
    assert faster_matmul(a, 65, 384) == {"blas": "onednn", "onednn": "blas"}[slow]
    assert "128 → 512" in remembered_choices()[-1].sizes
    assert kernels_in_use() == Kernels()


def test_small_matmuls_are_not_measured(cache: Path) -> None:
    a = architecture("multi-head", {})
    assert faster_matmul(a, 65, 64) == "blas"
    assert not cache.exists()


@pytest.mark.parametrize("slow", ["torch", "native"])
def test_attention_takes_the_kernel_that_is_faster(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention_in_c() is None:
        pytest.skip("no C compiler works here")
    _slowed("fused_attention", slow, monkeypatch)
    a = architecture("llama", {"embed_dim": 64, "heads": 4, "kv_heads": 2, "block_size": 32})
    assert faster_attention(a, 64) == {"torch": "native", "native": "torch"}[slow]
    assert remembered_choices()[-1].sizes == "4 heads of 16, 2 of keys, 2 × 32 tokens"
