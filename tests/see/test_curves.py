"""Curves: what is drawn when, what happens if drawing fails; verdicts in words."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlm import Dataset, Evaluated, Note, Run, Started
from attnlm.base.events import ignore
from attnlm.runs.records import DatasetFacts
from attnlm.runs.run import Result
from attnlm.see import curves
from attnlm.see.curves import CurveDrawer, Line, chart_data, picture, verdict
from tests.kit import Clock, quick_run
from tests.models import evaluation_record

train = partial(quick_run, model="bigram", steps=6, eval_every=2)
FACTS = DatasetFacts(name="foxes", bigram_loss=2.0)
PNG = b"\x89PNG\r\n\x1a\n"
DRAW = curves.draw_run  # before conftest.py takes it away


@pytest.fixture(autouse=True)
def drawn_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "draw_run", DRAW)


def test_the_curve_is_drawn_once_at_the_end_of_a_short_run(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(dataset)
    assert (run.path / "curve.png").read_bytes().startswith(PNG)
    assert [path.name for path in run.path.glob(".*")] == [".lock"]
    drawn: list[int] = []
    monkeypatch.setattr(curves, "draw_run", lambda run, path: drawn.append(len(run.metrics())))
    train(dataset)
    assert drawn == [4]  # evaluations at steps 0, 2, 4, 6


def test_curves_are_drawn_rarely_during_training(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    events: list[object] = []
    clock.tick = 1e-3
    train(dataset, on_event=events.append)
    clock.tick = 0
    start, drawn = clock.now, list[float]()
    monkeypatch.setattr(curves, "draw_run", lambda run, path: drawn.append(clock.now - start))
    drawer = CurveDrawer(ignore)
    drawer(next(event for event in events if isinstance(event, Started)))
    for second in range(1, 70):
        clock.advance(1)
        drawer(Evaluated(**vars(evaluation_record(second)), improved=True))
    assert drawn == pytest.approx([20, 40, 60])


def test_a_picture_that_fails_costs_one_note(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Run, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(curves, "draw_run", full)
    monkeypatch.setattr(curves, "_SECONDS_BETWEEN_DRAWINGS", 0.0)
    events: list[object] = []
    run = train(dataset, on_event=events.append)
    assert run.metrics()[-1]["step"] == 6
    said = [event.text for event in events if isinstance(event, Note)]
    assert said == ["curve.png cannot be drawn: No space left on device"]


LINES = [
    Line("bigram", [0, 100, 200], [4.0, 2.5, 2.4], "#a8607f"),
    Line("average", [0, 100, 200], [4.0, 3.5, 3.1], "#7c7fd0"),
]
KNOWN = {"uniform, ln V": 4.1, "counted bigram": 2.45}


def test_a_picture_leaves_the_users_style_alone() -> None:
    import matplotlib

    users_style = dict(matplotlib.rcParams)
    assert picture(LINES, KNOWN, "tokens").startswith(PNG)
    assert dict(matplotlib.rcParams) == users_style


def test_a_chart_is_logarithmic_if_seconds_differ_tenfold() -> None:
    slow = Line("slow", [1, 30], [4.0, 2.0], "#d9730d", band=[(3.9, 4.1), (1.9, 2.1)])
    quick = Line("quick", [0.1, 0.5], [4.0, 2.2], "#2a9d6e")
    chart = chart_data([quick, slow], KNOWN, "seconds")
    assert chart["isLogarithmic"] and not chart_data([slow], {}, "seconds")["isLogarithmic"]
    assert chart["baselines"] == [*KNOWN.items()]
    assert chart["lines"][1]["points"] == [(1, 4.0), (30, 2.0)]
    assert chart["lines"][1]["band"] == [(1, 3.9, 4.1), (30, 1.9, 2.1)]
    records = [evaluation_record(n, train_loss=3.0 - n, val_loss=3.5 - n) for n in (0, 1)]
    drawn = chart_data(curves.run_lines(records), {}, "step")["lines"]
    colours = {line["name"]: line["colour"] for line in drawn}
    assert colours == {name: f"var(--{name})" for name in ("validation", "training")}
    assert picture(curves.run_lines(records), {}, "step").startswith(PNG)


FALLING = [3.0, 2.0, 1.5, 1.2, 1.0]
LEVEL = [3.0, 2.0, 1.5, 1.6, 1.5]
RISING = [4.0, 2.0, 1.5, 1.6, 1.8]
NOISE = [4.0, 2.0, 1.5, 1.52, 1.54]
FLAT = [4.0, 2.0, 1.9, 1.899, 1.898]
TO_ZERO = [1.0, 1.0, 0.8, 0.6, 0.0]


@pytest.mark.parametrize(
    ("losses", "more", "said", "unsaid"),
    [
        ([4.0, 3.0], {}, "too few evaluations", "bigram"),
        (
            [3.9, 4.0, 3.95],
            {},
            "nothing was learned: no later loss is below that of step 0",
            "longer",
        ),
        ([4.0, 3.0, 2.5, 2.2, 2.1], {}, "loss still falling (0.100", "levelled"),
        (FLAT, {}, "loss levelled off: instead of more steps", "falling"),
        (FLAT, {"learning_rate": TO_ZERO}, "a longer run may reach a lower loss", "larger model"),
        (
            FLAT,
            {"learning_rate": TO_ZERO, "bigram_loss": 1.895, "model": "bigram"},
            "as good as counted bigrams: a bigram can learn no more",
            "longer",
        ),
        (RISING, {}, "does not fall", "overfitting"),
        ([4.0, 1.0, 0.52, 0.51], {"floor": 0.49}, "within 0.020 of the floor", "falling"),
        ([4.0, 1.0, 0.02, 0.01], {"learning_rate": [1, 1, 1, 0]}, "within 0.010 of 0", "longer"),
        ([4.0, 3.0, 2.5], {"bigram_loss": 2.4}, "not as good as the counted bigram", "yet"),
        ([4.0, 3.0, 2.3], {"bigram_loss": 2.4}, "falling", "bigram"),
        (RISING, {"train_loss": FALLING, "tokens": 100_000}, "overfitting since step 2", "few"),
        (RISING, {"train_loss": LEVEL, "tokens": 100_000}, "fall: a lower `learning_rate`", "over"),
        (NOISE, {"train_loss": FALLING, "tokens": 100_000}, "has risen by 0.040", "does not fall"),
        (NOISE, {"train_loss": FALLING, "tokens": 1280}, "levelled", "overfitting"),
        (NOISE, {"train_loss": FALLING, "tokens": 20}, "20 validation tokens are too few", "over"),
    ],
)
def test_the_verdict_names_overfitting_and_baselines(
    losses: list[float], more: dict[str, Any], said: str, unsaid: str
) -> None:
    """Overfitting is a rise beyond noise while the training loss falls."""
    known: dict[str, Any] = {name: more.get(name) for name in ("bigram_loss", "floor")}
    series = {name: values for name, values in more.items() if isinstance(values, list)}
    records = []
    for step, loss in enumerate(losses):
        values: dict[str, Any] = {name: series[name][step] for name in series}
        values |= {"val_loss": loss, "evaluated_tokens": more.get("tokens")}
        records.append(evaluation_record(step, **values))
    spec = SimpleNamespace(name=more.get("model", "average"))
    run: Any = SimpleNamespace(dataset=replace(FACTS, **known), config=SimpleNamespace(spec=spec))
    words = verdict(run, Result(records, {}, ""))
    assert said in words and unsaid not in words
