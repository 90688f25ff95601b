"""The ticker: what a run says and sees at each evaluation, kept whole and without side effects."""

from __future__ import annotations

import base64
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlm
from attnlm.base.errors import AttnlmError
from attnlm.compute.device import choose_device
from attnlm.model.recorder import record
from attnlm.runs.journal import EARLY_STEPS, PASSAGE, Snapshot
from attnlm.runs.run import Run
from attnlm.see.head_scores import PATTERNS
from attnlm.see.heads import heads as study_heads
from attnlm.see.report import report
from attnlm.training.events import Evaluated
from attnlm.workflows import train as launch
from attnlm.workflows.evaluate import take_snapshot
from tests.kit import quick_run
from tests.models import FRUITS, WithoutMaps, parts_of, timeless

CPU = choose_device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "fruits.txt").write_text(FRUITS)
    for tokenizer in ("char", "byte", "bpe:300"):
        attnlm.prepare(folder / "fruits.txt", data_dir=folder, tokenizer=tokenizer)
    return folder


def trained(data: Path, runs: Path, model: str = "multi-head", **settings: Any) -> Run:
    small: dict[str, Any] = {"block_size": 8, "steps": 12, "eval_every": 5, "device": "cpu"}
    if model == "transformer":
        small |= {"layers": 2, "heads": 2, "embed_dim": 16}
    name = settings.pop("dataset", "fruits-char")
    return quick_run(data / name, model, checkpoint_dir=runs, **{**small, **settings})


def steps(run: Run) -> list[int]:
    return [snapshot.step for snapshot in run.ticker()]


@pytest.mark.parametrize("rung", ["bigram", "average", "multi-head", "transformer"])
@pytest.mark.usefixtures("whole_snapshots")
def test_every_evaluation_records_a_sample_and_attention(
    rung: str, data: Path, tmp_path: Path
) -> None:
    run = trained(data, tmp_path, model=rung)
    snapshots, dataset = run.ticker(), attnlm.open_dataset(data / "fruits-char")
    assert [r["step"] for r in run.metrics()] == [0, 5, 10, 12]
    assert steps(run) == [0, 1, 3, 5, 10, 12]
    last = snapshots[-1]
    assert last.text == "".join(attnlm.sample(run, checkpoint="last", tokens=80, seed=0))
    passage = [int(i) for i in dataset.val[:8]]
    assert run.ticker_passage() == list(dataset.tokenizer.decode(passage))
    if rung == "bigram":
        assert last.weights is None
        return
    model, _ = attnlm.load_model(run, checkpoint="last", device="cpu")
    maps = record(model, torch.tensor([passage])).maps[:, 0].numpy()
    assert last.weights is not None and last.weights.shape == maps.shape
    assert last.weights == pytest.approx(maps, abs=0.5 / 255 + 1e-6)
    assert not np.triu(last.weights, 1).any()
    # In the file, each weight on or below the diagonal is a byte, and the first token's is 255.
    records = [json.loads(line) for line in (run.path / "ticker.jsonl").read_text().splitlines()]
    assert [list(r) for r in records[1:]] == [["step", "text", "maps", "shape", "scores"]] * 5
    assert list(records[0]) == ["step", "text", "maps", "passage", "shape", "scores"]
    packed = np.frombuffer(base64.b64decode(records[-1]["maps"]), np.uint8).reshape(-1, 36)
    assert (packed[:, 0] == 255).all()
    assert last.weights.reshape(-1, 8, 8)[:, 1, :2] == pytest.approx(packed[:, 1:3] / 255)
    found = study_heads(run, windows=256 // 8, checkpoint="last", device="cpu")
    assert np.shape(last.scores) == (len(PATTERNS), *maps.shape[:2])
    for head in found.heads:
        kept = [scores[head.layer][head.head] for scores in last.scores]
        assert kept == pytest.approx([*head.scores.values()], abs=0.0006)


@pytest.mark.parametrize("model", ["multi-head", "transformer"])
def test_an_attention_without_softmax_trains_and_has_no_maps(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.model.language_model.SelfAttention", WithoutMaps)
    run = attnlm.train(resume=trained(data, tmp_path, model=model).path, steps=13)
    assert steps(run) == [0, 1, 3, 5, 10, 12, 13]
    assert all(snapshot.text and snapshot.weights is None for snapshot in run.ticker())
    module, _ = attnlm.load_model(run, device="cpu")
    ids = run.tokenizer.encode("1 ")
    for _ in range(6):  # within the context
        with torch.no_grad():
            ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    greedy = attnlm.sample(run, prompt="1 ", tokens=6, temperature=0)
    assert "".join(greedy) == run.tokenizer.decode(ids)
    for call in (lambda: attnlm.attend("1 apples", run), lambda: study_heads(run)):
        with pytest.raises(AttnlmError, match="no attention weights"):
            call()
    found = report(run)
    assert found.heads is None and "no attention weights" in found.not_measured
    assert found.page().startswith(b"<!doctype html>")


@pytest.mark.parametrize("dataset", ["fruits-byte", "fruits-bpe300"])
def test_the_passage_is_short_with_every_tokenizer(
    dataset: str, data: Path, tmp_path: Path
) -> None:
    run = trained(data, tmp_path, dataset=dataset, block_size=40, steps=1, eval_every=1)
    assert len(run.ticker_passage()) == PASSAGE
    assert "".join(run.ticker_passage()) in FRUITS
    for snapshot in run.ticker():
        assert snapshot.weights is not None and snapshot.weights.shape == (1, 4, 24, 24)
        assert snapshot.weights.sum(-1) == pytest.approx(1, abs=0.05)


def test_the_ticker_does_not_change_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": "transformer", "dropout": 0.3}
    heard = trained(data, tmp_path, **settings)
    size = parts_of(heard.config)
    maps = np.zeros((size.layers, size.heads, 1, 1), np.float32)

    def silent(dataset: object, step: int, *_: object) -> Snapshot:
        return Snapshot.of(step, "", maps, passage=["a"])

    monkeypatch.setattr(launch, "take_snapshot", silent)
    mute = trained(data, tmp_path, **settings)
    assert timeless(heard.path) == timeless(mute.path)
    models = [attnlm.load_model(run, checkpoint="last", device="cpu")[0] for run in (heard, mute)]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    assert heard.ticker()[-1].text != mute.ticker()[-1].text == ""


@pytest.mark.parametrize("rung", ["bigram", "multi-head", "transformer"])
def test_the_ticker_ignores_weights_that_are_not_finite(
    rung: str, data: Path, tmp_path: Path
) -> None:
    model, _ = attnlm.load_model(trained(data, tmp_path, model=rung, steps=1), device="cpu")
    for number in (float("nan"), float("inf"), 3e38):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        snapshot = take_snapshot(attnlm.open_dataset(data / "fruits-char"), 1, model, CPU)
        assert snapshot.step == 1


def test_extra_and_truncated_lines_are_removed_on_resume(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path, steps=10, schedule="constant")
    events: list[object] = []
    whole = trained(data, tmp_path, steps=20, schedule="constant", on_event=events.append)
    told = [event.snapshot for event in events if isinstance(event, Evaluated)]
    kept = [(m.step, m.text) for m in whole.ticker() if m.step not in EARLY_STEPS[:2]]
    assert [(m.step, m.text) for m in told if m] == kept
    path = run.path / "ticker.jsonl"
    later = (whole.path / "ticker.jsonl").read_bytes().splitlines(keepends=True)[-1]
    with path.open("ab") as file:
        file.write(later + later[: len(later) // 2])
    assert steps(run) == [0, 1, 3, 5, 10, 20]
    resumed = attnlm.train(resume=run.path, steps=20)
    assert path.read_bytes() == (whole.path / "ticker.jsonl").read_bytes()
    assert steps(resumed) == [0, 1, 3, 5, 10, 15, 20]


def test_early_snapshots_continue_after_a_stop_and_need_an_evaluation_at_step_0(
    data: Path, tmp_path: Path
) -> None:
    def stop(step: int, loss: torch.Tensor) -> None:
        if step == 11:
            signal.raise_signal(signal.SIGINT)

    how: dict[str, Any] = {"steps": 40, "eval_every": 20, "schedule": "constant"}
    with pytest.raises(KeyboardInterrupt):
        trained(data, tmp_path, **how, name="stopped", on_step=stop)
    assert attnlm.open_run(tmp_path / "stopped").checkpoint("last").step == 11
    resumed = attnlm.train(resume=tmp_path / "stopped")
    whole = trained(data, tmp_path, **how, name="whole")
    assert steps(whole) == [0, 1, 3, 10, 20, 30, 40]
    for one, other in zip(resumed.ticker(), whole.ticker(), strict=True):
        assert (one.step, one.text) == (other.step, other.text)
    assert steps(trained(data, tmp_path, steps=4, eval_every=4)) == [4]


def test_lost_lines_are_accepted_and_foreign_lines_removed(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path, steps=10)
    path = run.path / "ticker.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    assert steps(attnlm.train(resume=run.path, steps=11)) == [0, 3, 11]
    path.unlink()
    assert run.ticker() == [] and run.ticker_passage() == []
    resumed = attnlm.train(resume=run.path, steps=20)
    assert steps(resumed) == [15, 20] and len(resumed.ticker_passage()) == 8
    other = trained(data, tmp_path, steps=9, eval_every=3)
    shutil.copy(other.path / "ticker.jsonl", run.path)
    assert steps(attnlm.train(resume=run.path, steps=25)) == [0, 1, 3, 25]


def map_bytes(count: int) -> str:
    return base64.b64encode(bytes(count)).decode()


def test_a_foreign_line_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    run = trained(data, tmp_path, steps=1, eval_every=1)
    path = run.path / "ticker.jsonl"
    record: dict[str, Any] = {
        "step": 0,
        "text": "a",
        "maps": map_bytes(4 * 36),
        "passage": list("12 appl"),
    }
    record["shape"] = [1, 4]
    path.write_text(json.dumps(record) + "\n")
    assert run.ticker()[0].weights is not None
    wrong: list[dict[str, Any]] = [
        *({"step": -1}, {"step": 1.0}, {"text": None}),
        *({"maps": "?"}, {"maps": map_bytes(4 * 36 + 1)}, {"maps": map_bytes(4 * 35)}),
        *({"passage": "fruits"}, {"passage": [1]}, {"shape": []}, {"shape": [2, 4]}),
        *({"scores": [[[0.5]]]}, {"scores": [[[0.5] * 4], [0.5]]}, {"scores": [[["a"] * 4]]}),
    ]
    for changed in wrong:
        path.write_text(json.dumps(record | changed) + "\n")
        with pytest.raises(AttnlmError, match=r"ticker\.jsonl is (damaged|not valid: )") as caught:
            run.ticker()
        assert "remove it" in caught.value.hint
        with pytest.raises(AttnlmError, match=r"ticker\.jsonl is (damaged|not valid: )"):
            attnlm.train(resume=run.path, steps=2)
    path.unlink()
    assert steps(attnlm.train(resume=run.path, steps=2)) == [2]


def test_the_ticker_stops_at_its_size_limit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlm.runs.run._FULL_TICKER", 1000)
    run = trained(data, tmp_path, steps=20)
    assert len(run.metrics()) == 5
    assert 0 < len(run.ticker()) < 5
    assert len(attnlm.train(resume=run.path, steps=21).metrics()) == 6
