"""The choice of device and precision, on a machine whose GPUs are made up."""

from __future__ import annotations

import pytest
import torch

from attnlm.base.errors import AttnlmError
from attnlm.compute import device
from attnlm.compute.device import choose_device


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPU is an Ampere."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that each device works."""
    monkeypatch.setattr(device, "_reason_against", lambda name: None)


@pytest.mark.parametrize(
    ("problems", "name", "dtype", "reason"),
    [
        ({}, "cuda", "bfloat16", "made up"),
        ({"cuda": "not there"}, "mps", "float32", "Apple GPU"),
        ({"cuda": "broken", "mps": "old"}, "cpu", "float32", "cuda: broken; mps: old"),
    ],
)
def test_device_auto_is_the_first_device_that_works(
    problems: dict[str, str], name: str, dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_reason_against", problems.get)
    chosen = choose_device()
    assert (chosen.name, chosen.dtype, chosen.reason) == (name, dtype, reason)
    assert choose_device("cpu").name == "cpu"
    for wrong, problem in problems.items():
        refusal = f"`device` {wrong} cannot be used: {problem}"
        with pytest.raises(AttnlmError, match=refusal) as error:
            choose_device(wrong)
        assert "cpu" in error.value.hint


def test_a_device_that_fails_its_trial_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(gpus, "is_available", lambda: True)

    def out_of_order(*shape: int, device: str, requires_grad: bool) -> None:
        raise RuntimeError({"cuda": "driver is old\nand so on", "mps": ""}[device])

    monkeypatch.setattr(torch, "ones", out_of_order)
    chosen = choose_device()
    assert chosen.name == "cpu"
    assert chosen.reason == (
        "cuda: a small trial failed (driver is old); mps: a small trial failed (RuntimeError)"
    )


def test_a_device_that_computes_wrong_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda x, targets: (x * torch.nan).sum()
    )
    with pytest.raises(AttnlmError, match="a small trial gave wrong numbers"):
        choose_device("cpu")


@pytest.mark.usefixtures("working")
def test_bfloat16_and_tf32_are_for_hardware_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cuda", "float32").dtype == "float32"
    assert choose_device("cuda", "tf32").dtype == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert [choose_device(name).dtype for name in ("cuda", "mps", "cpu")] == ["float32"] * 3
    assert choose_device("cuda", "bfloat16").dtype == "bfloat16"
    with pytest.raises(AttnlmError, match="the device is cuda"):
        choose_device("cuda", "tf32")


def test_a_trial_has_gradients_wherever_it_is_made() -> None:
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert choose_device("cpu").name == "cpu"


@pytest.mark.usefixtures("working")
def test_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"WORLD_SIZE": "6", "RANK": "1", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for asked in ("auto", "cuda"):
        with pytest.raises(AttnlmError, match="3 processes cannot share 2 GPUs"):
            choose_device(asked)
    assert choose_device("cpu").name == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("cuda").name == "cuda"
