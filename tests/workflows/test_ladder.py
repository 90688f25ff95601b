"""The ladder: rungs trained alike, tuned, within a budget, of own code, and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attnlm
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note
from attnlm.base.files import read_json, write_json
from attnlm.base.process import Interrupted
from attnlm.base.setting_fields import fields_of
from attnlm.config import variants
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.model.architecture import MODELS, PRESETS, Architecture, Preset
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.run import Run, open_run
from attnlm.see.comparison import Comparison
from attnlm.training.events import Evaluated, Started
from attnlm.training.step import StepNotFiniteError
from attnlm.workflows.answers import select_pairs
from attnlm.workflows.compare import compare_groups
from attnlm.workflows.train import train
from tests import own_code
from tests.browser import elements
from tests.kit import command, try_command
from tests.models import FRUITS, prepared, timeless
from tests.workflows.conftest import HEAD, LADDERS, Ladders

# --- Training -------------------------------------------------------------------------------------


def facts(ladder: Comparison) -> list[Any]:
    return [(g.text, g.values, timeless(g.shown.path)) for g in ladder.groups if not g.failed]


def plan_of(ladder: Comparison) -> LadderPlan:
    assert ladder.path is not None and ladder.plan == LadderPlan.read(ladder.path)
    return ladder.plan


def run_of(ladder: Comparison, rung: str, seed: int = 1) -> Run:
    """The run of a rung and a seed, where the plan says that it is."""
    return open_run(plan_of(ladder).runs(ladder.path or Path())[rung][seed - 1])


def test_rungs_are_ordinary_runs_trained_alike(climbed: Comparison, ladders: Ladders) -> None:
    assert repr(climbed).startswith("<Comparison of val_loss: bigram ")
    assert [rung.name for rung in climbed.groups] == ["bigram", "single-head"]
    for rung in climbed.groups:
        (run,) = rung.runs
        assert run.name == f"plain-{rung.name}"
        assert (run.config.spec.block_size, run.config.training.batch_size) == (64, 32)
        assert (run.config.training.steps, run.config.training.seed) == (6, 1)
        assert [record.step for record in rung.result.records] == [0, 2, 4, 6]
        assert rung.result.last.tokens == 6 * 32 * 64
        assert attnlm.evaluate(run, data=ladders.dataset).loss == pytest.approx(rung.mean)
        said = attnlm.sample(run, prompt="1 ", tokens=20, seed=1)
        assert "".join(said) == "1 " + (rung.text or "")


def test_losses_are_of_the_whole_split_where_all_rungs_were_measured_on_it(
    ladders: Ladders, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"steps": 20, "eval_every": 10, "eval_tokens": 64}
    found = ladders.train(tmp_path, rungs=("bigram", "average"), **given)
    for rung in found.groups:
        loss = attnlm.evaluate(rung.shown, device="cpu", data=ladders.dataset).loss
        assert rung.mean == loss != rung.result.last.val_loss
    (first, second) = (rung.shown for rung in found.groups)
    lines = (first.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first.path / "metrics.jsonl").write_text("".join(x for x in lines if "checkpoint" not in x))
    for rung in compare_groups({"a": [first], "b": [second]}).groups:
        assert rung.result.part.startswith("64 of") and not rung.result.whole


def test_a_preset_that_is_in_no_other_table_makes_a_ladder(
    ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contributor adds a preset and its name, and nothing else."""
    presets = {"bare": replace(PRESETS["multi-head"], settings=("block_size", "heads"))}
    presets["deep"] = Preset({**PRESETS["llama"].parts, "layers": 1}, PRESETS["llama"].settings)
    models = (*MODELS, *presets)
    for name, preset in presets.items():
        monkeypatch.setitem(PRESETS, name, preset)
    monkeypatch.setattr(variants, "MODELS", models)
    field = fields_of(Architecture)["model"]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "choices": models})

    rungs = ("bigram", "bare", "deep", "deep:layers=2")
    ladder = ladders.train(tmp_path, rungs=rungs, steps=2)
    page = elements(ladder.save(tmp_path / "page.html").read_bytes())
    dots = {found["style"] for _, found in page.found if found.get("class") == "dot"}
    assert len(dots) == 4
    rates = [rung.about["learning_rate"] for rung in ladder.groups]
    assert rates[1:3] == [0.03, 0.02]  # as for multi-head and transformer


def test_small_data_get_a_context_that_fits(ladders: Ladders, tmp_path: Path) -> None:
    small, notes = prepared(tmp_path, FRUITS[:23]), list[object]()  # 3 tokens are to validate
    rungs = ("bigram", "multi-head", "transformer")
    ladder = ladders.train(tmp_path, data=small, rungs=rungs, on_event=notes.append)
    assert Note("fruits-char is small: the context of the rungs is 2 tokens") in notes
    assert {rung.shown.config.spec.block_size for rung in ladder.groups} == {2}


def test_a_ladder_takes_a_free_number_and_prints_nothing(
    ladders: Ladders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ladder-001-single-head").mkdir()
    ladder = ladders.train(tmp_path, steps=1)
    assert ladder.path is not None and ladder.path.name == "ladder-002"
    assert capsys.readouterr() == ("", "")


def test_a_sweep_over_a_setting_is_a_comparison_of_several_seeds(
    ladders: Ladders, tmp_path: Path
) -> None:
    rungs = ("bigram", "bigram:learning_rate=0.3", "bigram:batch_size=8")
    given: dict[str, Any] = {"rungs": rungs, "steps": 2, "seeds": 3, "name": "mine"}
    ladder = ladders.train(tmp_path, **given, baseline="bigram")
    runs = attnlm.list_runs(tmp_path)
    assert len(runs) == 10 and "mine-bigram-learning_rate-0.3-seed-3" in {r.name for r in runs}
    for rung, rate, batch in zip(ladder.groups, (0.1, 0.3, 0.1), (32, 32, 8), strict=True):
        assert [run.config.training.seed for run in rung.runs] == [1, 2, 3]
        assert (rung.about["learning_rate"], rung.about["batch_size"]) == (rate, batch)
        assert rung.values == [min(r["val_loss"] for r in run.metrics()) for run in rung.runs]
    assert [pair.groups for pair in ladder.pairs] == [(name, "bigram") for name in rungs[1:]]
    assert [pair.paired for pair in ladder.pairs] == [True, False]  # the batches differ
    with pytest.raises(AttnlmError, match="mine exists, and runs are never") as caught:
        ladders.train(tmp_path, **given)
    assert "attnlm ladder --resume mine" in caught.value.hint
    assert facts(attnlm.ladder(resume=ladder.path)) == facts(ladder)
    with pytest.raises(UsageError, match="`baseline` 'x' is no group"):
        attnlm.ladder(resume=ladder.path, baseline="x")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rungs": ()}, "is empty"),
        ({"rungs": ["mine.py:T:kind=x/y", "mine.py:T:kind=z/y"]}, "cannot have folders of these"),
        ({"rungs": ["mine.py:T:kind=.."]}, "cannot have folders of these names"),
        ({"rungs": ["mine.py:T:kind=a*b"]}, "cannot have folders of these names"),
        ({"budget": 5.0}, "cannot be combined"),
        ({"baseline": "average"}, "is no group"),
        ({"steps": None, "budget": -1.0}, "invalid value for `budget`"),
    ],
)
def test_what_makes_no_ladder_is_refused_before_anything_is_written(
    given: dict[str, Any],
    says: str,
    ladders: Ladders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class T: ...")
    with pytest.raises(UsageError, match=says):
        ladders.train(tmp_path / "runs", **given)
    assert not (tmp_path / "runs").exists()


def test_a_class_is_no_rung() -> None:
    rungs: list[Any] = ["bigram", attnlm.Run]
    with pytest.raises(UsageError, match="a rung is the name of a model"):
        attnlm.ladder(rungs=rungs)


# --- Stopped and resumed --------------------------------------------------------------------------


class StopAt:
    """Interrupts at a note that begins like this, or at the evaluation of a step after it."""

    def __init__(self, note: str, step: int | None = None) -> None:
        self.note, self.step, self.is_near = note, step, False

    def __call__(self, event: object) -> None:
        if isinstance(event, Note):
            self.is_near = event.text.startswith(self.note)
        is_step = isinstance(event, Evaluated) and getattr(event, "step", None) == self.step
        if self.is_near and self.step is None:
            raise KeyboardInterrupt  # SIGINT, unless a shell started the tests in the background
        if self.is_near and is_step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("kind", "stop", "resumes_at"),
    [
        ("plain", StopAt("rung 1", 2), ("bigram", 2)),
        ("plain", StopAt("rung 2", 4), ("single-head", 4)),
        ("tuned", StopAt("tried bigram with learning rate 0.1"), ("bigram", 0)),
        ("equal parameters", StopAt("rung 2", 2), ("single-head", 2)),
    ],
)
def test_a_stopped_ladder_resumes_as_if_it_had_not_stopped(
    kind: str, stop: StopAt, resumes_at: tuple[str, int], ladders: Ladders, tmp_path: Path
) -> None:
    whole, events = ladders.whole(kind), list[object]()
    with pytest.raises(KeyboardInterrupt):
        ladders.train(tmp_path, kind, name="mine", on_event=stop)
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path, "data_dir": ladders.folder / "data"}
    resumed = attnlm.ladder(resume="mine", on_event=events.append, **folders)
    assert facts(resumed) == facts(whole)
    assert plan_of(resumed).adapted == plan_of(whole).adapted
    first = next(event for event in events if isinstance(event, Started))
    assert (first.run.config.spec.name, first.first_step) == resumes_at
    # And the same command once more has nothing left to train.
    events.clear()
    again = attnlm.ladder(resume="mine", on_event=events.append, **folders)
    assert facts(again) == facts(whole)
    assert not any(isinstance(event, Started) for event in events)
    (tmp_path / "mine").rename(tmp_path / "other")

    def stop_at_the_first(event: object) -> None:
        events.append(event)
        StopAt("rung 1")(event)

    with pytest.raises(KeyboardInterrupt):
        attnlm.ladder(resume="other", on_event=stop_at_the_first, **folders)
    assert "if it was renamed, rename its runs too" in str(events)


def test_a_ladder_whose_data_were_moved_is_resumed_with_them(
    climbed: Comparison, ladders: Ladders, tmp_path: Path
) -> None:
    shutil.copytree(ladders.dataset.path, tmp_path / "data" / "old")
    old = attnlm.open_dataset(tmp_path / "data" / "old")
    with pytest.raises(Interrupted):
        ladders.train(tmp_path, data=old, name="m", on_event=StopAt("rung 1", 2))
    (tmp_path / "data").rename(tmp_path / "moved")
    new = (tmp_path / "moved" / "old").rename(tmp_path / "moved" / "new")
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path, "data_dir": tmp_path / "moved"}
    for open_it in (attnlm.ladder, attnlm.train):  # and none that nobody named is offered
        name = "m" if open_it is attnlm.ladder else "m-bigram"
        with pytest.raises(AttnlmError, match=f"the data set of {name} is gone: ") as caught:
            open_it(resume=name, **folders)
        assert caught.value.hint == "prepare it again, or move it back to this place"
    ladder = attnlm.ladder(new, resume="m", checkpoint_dir=tmp_path)
    assert [rung.values for rung in ladder.groups] == [rung.values for rung in climbed.groups]
    first = ladder.groups[0]
    assert attnlm.evaluate(first.shown, checkpoint="last").loss == first.mean


@pytest.mark.parametrize(
    ("given", "made"),
    [  # a step of the bigram takes 1 ms, and of the head 3 ms
        ({"budget": 0.4}, [70, 70]),  # 0.7 · 400 / (1 + 3)
        ({"budget": 0.4, "seeds": 2}, [35, 35]),
        ({"budget": 0.4, "equal": "time"}, [140, 47]),
        ({"steps": 9, "equal": "time"}, [9, 3]),
        ({"steps": 9, "equal": "flops"}, [9, 9]),  # the bigram has no matmuls
    ],
)
def test_a_budget_becomes_steps_before_the_first_rung_trains(
    given: dict[str, Any],
    made: list[int],
    ladders: Ladders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(config: Config, *_: object) -> float:
        return {"bigram": 1e-3, "single-head": 3e-3}[config.spec.name] / config.tokens_per_step

    monkeypatch.setattr("attnlm.workflows.ladder.seconds_per_token", timed)
    given = {"steps": None, "eval_every": 1000, "name": "m", **given}
    with pytest.raises(KeyboardInterrupt):
        ladders.train(tmp_path, on_event=StopAt("rung 1"), **given)
    monkeypatch.delattr("attnlm.workflows.ladder.seconds_per_token")
    plan = LadderPlan.read(tmp_path / "m")
    assert [plan.settings(rung, 1)["steps"] for rung in plan.rungs] == made
    if "seeds" not in given:
        ladder = attnlm.ladder(resume="m", checkpoint_dir=tmp_path)
        assert [rung.result.last.step for rung in ladder.groups] == made


def test_a_rung_that_never_saved_begins_again_and_one_without_its_metrics_is_refused(
    climbed: Comparison, tmp_path: Path
) -> None:
    assert climbed.path is not None
    for folder in (climbed.path, *(rung.shown.path for rung in climbed.groups)):
        shutil.copytree(folder, tmp_path / folder.name)
    lost = tmp_path / f"{climbed.path.name}-single-head"
    for file in ("best.safetensors", "last.safetensors"):
        (lost / file).unlink()
    again = attnlm.ladder(resume=climbed.path.name, checkpoint_dir=tmp_path)
    assert facts(again) == facts(climbed)
    (lost / "metrics.jsonl").unlink()
    with pytest.raises(AttnlmError, match=r"metrics\.jsonl is damaged"):
        attnlm.ladder(resume=climbed.path.name, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rungs", [["bigram"]], "is not valid: its 'rungs' cannot be ['bigram']"),
        ("rungs", ["bigram", "bigram"], "is not valid: `rungs` is empty or contains a rung twice"),
        ("rungs", ["transformer:slope=2"], "is not valid: 'slope' is not a setting of transformer"),
        ("steps", -1, "is not valid: invalid value for `steps`: -1"),
        ("block_size", 0, "is not valid: invalid value for `block_size`: 0"),
        ("tokens", -1, "is not valid: its 'tokens' cannot be -1"),
        ("seed", 2**70, "is not valid: invalid value for `seed`: 1180591620717411303424"),
        ("tune", "rate", "is not valid: its 'tune' cannot be 'rate'"),
        ("equal", "x", "is not valid: its 'equal' cannot be 'x'"),
        ("adapted", [], "is not valid: its 'adapted' cannot be []"),
        ("adapted", {"bigram": 1}, "is not valid: its 'adapted' cannot be {'bigram': 1}"),
        (
            "adapted",
            {"bigram": {"batch_size": -1}},
            "is not valid: invalid value for `batch_size`: -1",
        ),
        ("dataset", {"name": 1}, "is not valid: its 'dataset.name' cannot be 1"),
        ("codes", [1], "is not valid: its 'codes' cannot be [1]"),
        ("codes", None, "is not valid: its 'codes' cannot be None"),
        ("failed", {"bigram": 1}, "is not valid: its 'failed' cannot be {'bigram': 1}"),
        ("failed", {"average": ""}, "is not valid: its 'failed' cannot be {'average': ''}"),
    ],
)
def test_a_plan_that_nobody_would_write_is_refused(
    key: str, value: object, says: str, climbed: Comparison, tmp_path: Path
) -> None:
    """A forged record can have a valid hash."""
    content = read_json((climbed.path or Path()) / "ladder.json")
    write_json(tmp_path / "ladder.json", {**content, key: value})
    with pytest.raises(AttnlmError) as caught:
        LadderPlan.read(tmp_path)
    assert caught.value.message == f"{tmp_path / 'ladder.json'} {says}"


# --- Failed rungs ---------------------------------------------------------------------------------

FAILING = """
import torch

class Late(torch.nn.Module):
    most = 6

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()
        return self.later(x) if self.calls > self.most else x

    def later(self, x):
        raise ValueError("too late")

class Diverges(Late):
    most = 5

    def later(self, x):
        return x / 0

class Forgets(torch.nn.Module):
    calls, least = 0, 6

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()
        return x * (1 + max(0, self.calls - self.least))

class ForgetsAtOnce(Forgets):
    least = 0

class Other(Late):
    def forward(self, x):
        self.calls += self.training
        return x[:, 1:] if self.calls > 6 else x


class InPlace(torch.nn.Module):
    def forward(self, x):
        y = x.sigmoid()
        y += 1
        return y


class Short(torch.nn.Module):
    def forward(self, x):
        assert x.size(-2) > 9, "too short"
        return x
"""


FAILURES = {
    "Late": "its code raised ValueError: too late",
    "Short": "its code raised AssertionError: too short",  # when the rung writes a text
    "Other": "part.py:Other returns",
    "InPlace": "RuntimeError: one of the variables needed for gradient",
    "Diverges": "no longer finite numbers",
    "Forgets": "calls differs",
}
SMALL = "transformer:embed_dim=8:heads=2:layers=1:mlp="


def test_rungs_that_fail_leave_the_others_to_be_compared(ladders: Ladders, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(FAILING)
    failing = [f"{SMALL}{tmp_path}/part.py:{part}" for part in FAILURES]
    notes: list[str] = []
    given: dict[str, Any] = {"rungs": (*failing, *LADDERS["plain"]["rungs"]), "name": "plain"}
    ladder = ladders.train(tmp_path, **given, on_event=lambda event: notes.append(str(event)))
    assert facts(ladder) == facts(ladders.whole("plain"))
    failed = {group.name: group.failed or "" for group in ladder.groups[2:]}
    assert [*failed] == failing
    for why, reason in zip(failed.values(), FAILURES.values(), strict=True):
        assert reason in why
    raised = sum("its code raised" in reason for reason in FAILURES.values())
    assert sum("Traceback (most recent call last):" in note for note in notes) >= raised
    _, rows = ladder.table()
    assert rows[-1] == [failing[-1], "failed", *[""] * len(rows[0][2:])]
    page = elements(ladder.save(tmp_path / "page.html").read_bytes()).text
    assert all(f"{name} failed: {why}" in page for name, why in failed.items())
    # And a resumed ladder goes past them.
    notes.clear()
    again = attnlm.ladder(resume=ladder.path, on_event=lambda event: notes.append(str(event)))
    assert facts(again) == facts(ladder) and again.plan == ladder.plan
    assert not any(note.startswith("rung 1 of 8") for note in notes)


def test_a_rung_that_diverges_while_it_is_timed_fails_alone(
    ladders: Ladders, tmp_path: Path
) -> None:
    (tmp_path / "part.py").write_text(FAILING)
    rungs = (f"{SMALL}{tmp_path}/part.py:Diverges", "bigram")
    bigram, diverged = ladders.train(tmp_path, rungs=rungs, steps=None, budget=2.0).groups
    assert bigram.results and "no longer finite" in (diverged.failed or "")


def test_a_command_with_a_failed_rung_shows_the_others_and_exits_with_1(
    ladders: Ladders, tmp_path: Path
) -> None:
    (tmp_path / "part.py").write_text(FAILING)
    failing = f"{SMALL}part.py:Late"
    words = ["ladder", str(ladders.dataset.path), "--rungs", f"{failing},bigram", "--steps", "6"]
    with contextlib.chdir(tmp_path):
        done = try_command([*words, "--seeds", "2", "--tokens", "1", "--json"])
    assert done.code == 1 and done.stdout, done.stderr
    bigram, late = json.loads(done.stdout)["groups"]
    assert (bigram["failed"], late["failed"]) == (None, "its code raised ValueError: too late")
    (first, second) = (run["seed"] for run in bigram["runs"].values())
    assert second == first + 1 and late["runs"] == {}
    assert 'part.py", line' in done.stderr and "rung 1 of 2" in done.stderr
    assert f"{failing}, seed {second}" not in done.stderr
    *_, error, hint = done.stderr.splitlines()
    assert error == f"error: 1 of 2 rungs failed: {failing}" and "repaired code" in hint


def test_the_state_of_own_parts_is_checked_before_the_first_rung_trains(
    ladders: Ladders, tmp_path: Path
) -> None:
    (tmp_path / "part.py").write_text(FAILING)
    rungs = ("bigram", f"{SMALL}{tmp_path}/part.py:ForgetsAtOnce")
    with pytest.raises(AttnlmError, match="calls differs") as caught:
        ladders.train(tmp_path / "runs", rungs=rungs)
    assert caught.value.message.startswith(rungs[1]) and "register_buffer" in caught.value.hint
    assert not (tmp_path / "runs").exists()


def test_a_ladder_whose_rungs_all_fail_says_why(ladders: Ladders, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(FAILING)
    rungs = (f"{SMALL}{tmp_path}/part.py:Diverges",)
    notes: list[str] = []
    with pytest.raises(AttnlmError, match="all rungs failed: transformer") as e:
        ladders.train(
            tmp_path,
            rungs=rungs,
            steps=40,
            tune=True,
            on_event=lambda n: notes.append(str(n)),
        )
    assert "repaired code" in e.value.hint
    assert sum("the loss, gradient or weights are no longer finite" in n for n in notes) == 6


# --- Tuned ----------------------------------------------------------------------------------------


def told(notes: Sequence[object]) -> dict[float, str]:
    """What notes say of the trials of one rung, by the value that was tried."""
    found = (re.search(r"tried .* ([\d.]+): (.*)", str(note)) for note in notes)
    return {float(match[1]): match[2] for match in found if match}


def test_each_rung_gets_the_best_of_its_own_values(ladders: Ladders, tmp_path: Path) -> None:
    notes: list[str] = []
    tuned = ladders.train(tmp_path, "tuned", on_event=lambda event: notes.append(str(event)))
    assert tuned.plan is not None and tuned.path is not None
    dataset, (bigram, head, fixed) = ladders.dataset, tuned.plan.rungs
    for rung, values in {
        bigram: [0.025, 0.05, 0.1, 0.2, 0.4],
        head: [0.0075, 0.015, 0.03, 0.06, 0.12],
    }.items():
        tried = told([note for note in notes if note.startswith(f"tried {rung} ")])
        assert [*tried] == values
        run = run_of(tuned, rung)
        assert run.config.training.learning_rate == min(tried, key=lambda value: tried[value])
        assert run.config.training.steps == 10
    assert run_of(tuned, fixed).config.training.learning_rate == 0.02
    # A trial is the same as a run on a text without the last tenth, which is its validation split.
    cut = dataset.train_tokens - dataset.train_tokens // 10
    part = replace(dataset, train=dataset.train[:cut], val=dataset.train[cut:], train_tokens=cut)
    part = replace(part, val_tokens=dataset.train_tokens // 10)
    settings: dict[str, Any] = {"model": "bigram", "learning_rate": 0.05, "block_size": 64}
    settings |= {"batch_size": 32, "steps": 2, "seed": 1, "checkpoint_dir": tmp_path}
    alone = attnlm.train(part, name="alone", **settings).evaluations()[-1].val_loss
    assert f"tried bigram with learning rate 0.05: loss {alone:.4f}" in notes
    # The trials leave nothing behind.
    assert {path.name for path in tuned.path.iterdir()} == {".lock", "ladder.json"}


def test_a_ladder_of_questions_is_tuned_on_them_and_answers_one(tmp_path: Path) -> None:
    task = attnlm.prepare("copy", examples=200, length=2, data_dir=tmp_path)
    notes: list[str] = []
    given: dict[str, Any] = {"steps": 20, "seed": 1, "tune": True, "rungs": ["bigram"]}
    ladder = attnlm.ladder(
        task, checkpoint_dir=tmp_path, on_event=lambda event: notes.append(str(event)), **given
    )
    question, _ = select_pairs(task, 1)[0]
    assert plan_of(ladder).prompt == question + "="
    (rung,) = ladder.groups
    assert [rung.text] == attnlm.generate(rung.shown, [question], tokens=200)
    tried = told(notes)
    best = min(tried, key=lambda value: tried[value])
    assert len(tried) == 5 and best == max(tried)
    assert f"bigram prefers a rate of {best:g}, at the end of what was tried" in notes
    header, rows = ladder.table()
    assert rows[0][header.index("right answers")].endswith("%")
    (note,) = compare_groups({"a": rung.runs}, "accuracy").notes
    assert "the checkpoint with the lowest loss: `best_by` accuracy" in note


def test_a_value_with_which_training_diverges_is_not_chosen(
    ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(dataset: Any, recipe: Any, **options: Any) -> Run:
        if recipe["learning_rate"] > 0.1:
            raise StepNotFiniteError(1, 1, TrainingConfig())
        options["on_event"](Note(f"memory ran out at {recipe['learning_rate']}"))
        return train(dataset, recipe=recipe, **options)

    notes: list[object] = []
    monkeypatch.setattr("attnlm.workflows.train_all.train", training)
    given: dict[str, Any] = {"rungs": ("bigram",), "steps": 10, "tune": True}
    ladder = ladders.train(tmp_path, on_event=notes.append, **given)
    assert [value for value, said in told(notes).items() if "no longer finite" in said] == [
        0.2,
        0.4,
    ]
    assert Note("memory ran out at 0.05") in notes  # in a trial
    assert plan_of(ladder).adapted == {"bigram": {"learning_rate": 0.1}}
    assert ladder.groups[0].about["learning_rate"] == 0.1


# --- Own code -------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return own_code.written(tmp_path / "code")


def test_a_rung_of_the_users_is_compared(own: Path, ladders: Ladders, tmp_path: Path) -> None:
    rung = f"{HEAD.format(own)}:start=2"
    rungs = ["bigram", "multi-head", rung]
    ladder = ladders.train(tmp_path / "runs", rungs=rungs, steps=2, seeds=2, name="mine")
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    kept = "mine-multi-head-attention-parts.py-Head-embed_dim-8-heads-2-start-2"
    assert [n for n in names if "parts" in n] == [kept, f"{kept}-seed-2"]
    assert ladder.groups[-1].about["set.start"] == 2.0
    assert "batch_size" not in ladder.differences
    (faster,) = (warning for warning in ladder.warnings if "faster forms" in warning)
    assert rung in faster and "bigram" not in faster
    assert "parts.py:Head" in ladder.save(tmp_path / "page.html").read_text()


def test_another_user_resumes_a_rung_of_own_code_after_accepting_its_copy(
    own: Path, ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs, path = ["bigram", HEAD.format(own)], tmp_path / "runs" / "x"
    with pytest.raises(KeyboardInterrupt):
        ladders.train(path.parent, rungs=rungs, name="x", on_event=StopAt("rung 2"))
    (own / "parts.py").unlink()
    own_code.become_another_user(monkeypatch, tmp_path)
    folders: dict[str, Any] = {"data_dir": ladders.folder / "data"}
    with pytest.raises(AttnlmError, match="this run needs code of its own") as refused:
        attnlm.ladder(resume=path, **folders)
    assert str(path / "code" / "parts.py") in refused.value.message
    attnlm.accept_code(path / "code" / "parts.py")
    ladder = attnlm.ladder(resume=path, **folders)
    assert [rung.name for rung in ladder.groups] == rungs
    # It is accepted once, and is not asked for in a new process.
    own_code.become_a_new_process(monkeypatch)
    assert facts(attnlm.ladder(resume=path, **folders)) == facts(ladder)


@pytest.mark.parametrize(
    "form",
    ["hash", "no hash", "other name", "changed file", {"parts.py:Head": 3}, {"x": "y"}, {"": ""}],
)
def test_a_forged_ladder_runs_nothing(
    form: Any, ladders: Ladders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ladders.whole("own").path or Path()
    for folder in path.parent.glob("own*"):
        shutil.copytree(folder, tmp_path / "runs" / folder.name)
    mark = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    content, copies = f"{own_code.PARTS}\n{mark}", tmp_path / "runs" / "own" / "code"
    for path in (tmp_path / "evil.py", copies / "evil.py", copies / "parts.py"):
        path.write_text(content)
    path = tmp_path / "runs" / "own" / "ladder.json"
    record = read_json(path)
    (name,) = record["codes"]
    if form == "hash":
        record["codes"] = {name: hashlib.sha256(content.encode()).hexdigest()}
    elif form != "changed file":
        record["codes"] = form if isinstance(form, dict) else {}
    if form == "other name":
        record["rungs"] = ["bigram", f"multi-head:attention={tmp_path}/evil.py:Head"]
    write_json(path, record)
    own_code.become_another_user(monkeypatch, tmp_path)
    with contextlib.chdir(tmp_path):
        folders = ["--checkpoint-dir", "runs", "--data-dir", str(ladders.folder / "data")]
        done = try_command(["ladder", "--resume", "own", *folders])
    assert done.code in (1, 2) and done.fault() is None, done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_command_compares_rungs_of_equal_operations(
    own: Path, ladders: Ladders, tmp_path: Path
) -> None:
    rungs = f"single-head,single-head:attention={own}/parts.py:Fused,{own}/models.py:lecture"
    words = ["ladder", "fruits-char", "--rungs", rungs, "--steps", "3", "--tokens", "2"]
    words += ["--equal", "flops", "--checkpoint-dir", str(tmp_path / "runs"), "--json"]
    done = command(*words, cwd=ladders.folder)
    first, fused, whole = json.loads(done.stdout)["groups"]
    steps = [next(iter(group["runs"].values()))["step"] for group in (first, fused, whole)]
    assert steps[2] > steps[1] == steps[0] == 3
    for rung in (fused, whole):
        assert rung["flops"] == pytest.approx(first["flops"], rel=0.2)
    assert "for equal flops: single-head: steps 3; single-head:attention=" in done.stderr
    assert "each rung makes the steps that need as many FLOPs" in done.stderr
