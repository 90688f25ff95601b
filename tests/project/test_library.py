"""The package as a notebook meets it: its names, its help, and what its calls take and refuse."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlm
from attnlm.base.setting_fields import describe_settings, help_of
from attnlm.config.settings import RECORD_OF
from attnlm.generation.sampling_config import SAMPLING
from tests.kit import command, quick_run
from tests.project.documents import text_of, write_files

SMALL: dict[str, Any] = {"model": "single-head", "embed_dim": 8, "block_size": 8, "seed": 1}


# --- Names and help -------------------------------------------------------------------------------


def test_every_name_is_listed_loaded_and_seen_by_type_checkers() -> None:
    assert dir(attnlm) == sorted(attnlm.__all__)
    for name in attnlm.__all__:
        assert inspect.getdoc(getattr(attnlm, name)), name
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        getattr(attnlm, "no_such_name")  # noqa: B009
    (block, *_) = (
        node
        for node in ast.parse(inspect.getsource(attnlm)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        (alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {(name, f"attnlm.{home}") for name, home in attnlm._HOMES.items()}
    assert {name for name, _ in imported} == set(attnlm.__all__) - {"__version__"}


def test_help_explains_the_package() -> None:
    text = pydoc.plain(pydoc.render_doc(attnlm))
    functions = [name for name in attnlm.__all__ if inspect.isroutine(getattr(attnlm, name))]
    assert len(functions) > 7
    for name in functions:
        assert re.search(rf"^    {name}\(", text, re.MULTILINE)  # pydoc shows it
        assert re.search(rf"\b{name}\b", attnlm.__doc__ or "")
    for documented in (attnlm, attnlm.Batches):
        assert "a baseline in the same loop" in " ".join((inspect.getdoc(documented) or "").split())


def examples() -> Iterator[Any]:
    """The indented lines of the docstrings of all public functions, methods and classes, and those
    of the package from its first import on."""
    _, about = inspect.cleandoc(attnlm.__doc__ or "").split("An example:\n\n")
    yield pytest.param(textwrap.dedent(about.partition("\n\nNothing")[0]), id="attnlm")
    for name in attnlm.__all__:
        value = getattr(attnlm, name)
        if not callable(value):
            continue
        of_class = vars(value).items() if isinstance(value, type) else ()
        methods = ((f"{name}.{n}", m) for n, m in of_class if inspect.isfunction(m))
        for title, documented in [(name, value), *methods]:
            doc = inspect.getdoc(documented) or ""
            found = re.search(r"\n\n((?:    .*\n?|\n)+)", re.split(r"\nSettings[;:]", doc)[0])
            if found is not None:
                yield pytest.param(textwrap.dedent(found[1]), id=title)


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def small_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tales.txt").write_text("Once upon a time there was a fox.\n354+81=12+7\n" * 60)
    (folder / "my-novel.txt").write_text("It was a dark and stormy night. " * 900)
    write_files(text_of("docs/own-part.md"), folder)
    dataset = attnlm.prepare(folder / "tales.txt", data_dir=folder / "data", name="tales-char")
    for model in ("bigram", "transformer", "multi-head"):
        quick_run(dataset, model, block_size=16, steps=2)
    attnlm.export(folder / "checkpoints" / "transformer-001", folder / "exported")
    return folder


def test_every_function_has_an_example() -> None:
    functions = {name for name in attnlm.__all__ if inspect.isfunction(getattr(attnlm, name))}
    assert functions < {example.id for example in EXAMPLES}
    assert {"ProgressBar", "Run.metrics"} < {e.id for e in EXAMPLES}


@pytest.mark.documents
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_docstrings_raise_nothing(
    example: str, small_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if "export(" in example:
        shutil.rmtree("exported")
    sizes = "" if "ladder(" in example else ", embed_dim=8, block_size=16"
    small = re.sub(r"steps=\d+", f"steps=2{sizes}", example)
    small = small.replace('"tales"', '"tales.txt"')
    exec(small, {"attnlm": attnlm, "torch": torch, "run": attnlm.open_run("multi-head-001")})


@pytest.mark.parametrize(
    ("function", "records"),
    [(attnlm.train, RECORD_OF), (attnlm.sample, SAMPLING), (attnlm.samples, SAMPLING)],
)
def test_help_lists_every_setting_with_its_limits(function: Any, records: dict[str, type]) -> None:
    text = pydoc.plain(pydoc.render_doc(function))
    for name, record in records.items():
        assert re.search(rf"^ +{name} : (bool|int|float|str)\b", text, re.MULTILINE), name
        assert help_of(record, name) in text


def test_limits_are_described() -> None:
    text = describe_settings({**RECORD_OF, **SAMPLING})
    for described in (
        "embed_dim : int, at least 1, at most 1048576\n    width",
        "dropout : float, at least 0, below 1\n",
        "budget : float, above 0, at most 100000000\n",
        "top_p : float, above 0, at most 1\n",
    ):
        assert described in text


# --- What the calls take --------------------------------------------------------------------------


def test_train_takes_a_dataset_a_path_a_name_or_the_latest(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    opened = attnlm.open_dataset("foxes")
    given: list[Any] = [opened, opened.path, str(opened.path.absolute()), "foxes", None]
    losses = [
        attnlm.train(dataset, checkpoint_dir=tmp_path, steps=1, **SMALL).metrics()[-1]["val_loss"]
        for dataset in given
    ]
    assert len(set(losses)) == 1
    assert attnlm.open_dataset(opened) is opened
    assert attnlm.open_dataset(opened, verify=True) is not opened


def test_a_run_can_be_given_wherever_a_name_can(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    dataset = attnlm.open_dataset("foxes")
    run = attnlm.train(dataset, checkpoint_dir=str(tmp_path), steps=1, **SMALL)
    name, runs = run.name, str(tmp_path)
    assert attnlm.open_run(run) is run
    assert attnlm.open_run(checkpoint_dir=runs) == attnlm.open_run(name, checkpoint_dir=runs) == run
    loss = attnlm.evaluate(run, data=dataset).loss
    assert loss == attnlm.evaluate(tmp_path / name, data="foxes").loss
    text = "".join(attnlm.sample(run, tokens=9, seed=1))
    assert text == "".join(attnlm.sample(f"{runs}/{name}", tokens=9, seed=1))
    attnlm.train(resume=name, checkpoint_dir=runs, steps=2)
    # What `run` says of its steps is out of date by now.
    assert attnlm.train(resume=run, steps=3).metrics()[-1]["step"] == 3
    assert attnlm.train(resume=run, patience=9).config.training.steps == 3


@pytest.mark.parametrize(
    ("says", "call"),
    [
        ("a data set cannot be of type Run", lambda run, data: attnlm.train(run)),
        ("a run cannot be of type Dataset", lambda run, data: attnlm.train(resume=data)),
        ("a run cannot be of type Dataset", lambda run, data: attnlm.sample(data)),
        ("a run cannot be of type int", lambda run, data: attnlm.samples(5, num_samples=2)),  # type: ignore[arg-type]
        ("a data set cannot be of type Run", lambda run, data: attnlm.evaluate(run, data=run)),
        ("a run cannot be of type Dataset", lambda run, data: attnlm.load_model(data)),
    ],
)
def test_runs_and_data_sets_of_a_wrong_type_are_refused(
    says: str, call: Callable[[Any, Any], object], run: attnlm.Run, trained: Path
) -> None:
    with pytest.raises(attnlm.UsageError, match=says) as raised:
        call(run, attnlm.open_dataset(trained / "data" / "foxes"))
    assert "pass a name, a path or an open" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [
        ("sample", "prompt", (["the "], 3, b"the ")),
        ("samples", "prompt", (["the ", 3], 3, None)),
        ("sample", "stop", (["a", 1], 5, None)),
        ("sample", "tokens", ("9",)),
        ("samples", "num_samples", (0,)),
        ("heads", "windows", (0,)),
        ("report", "windows", (0,)),
    ],
)
def test_settings_of_a_wrong_type_or_size_are_refused(
    name: str, setting: str, values: tuple[object, ...], run: attnlm.Run
) -> None:
    for value in values:
        with pytest.raises(attnlm.UsageError, match=f"invalid value for `{setting}`"):
            getattr(attnlm, name)(run, **{setting: value})


def test_a_wrong_setting_of_sample_names_the_right_one(run: attnlm.Run) -> None:
    with pytest.raises(attnlm.UsageError, match="one text") as raised:
        attnlm.sample(run, num_samples=3)
    assert "attnlm.samples(" in raised.value.hint
    with pytest.raises(attnlm.UsageError, match="unknown setting 'max_new_tokens'") as raised:
        attnlm.sample(run, max_new_tokens=9)
    assert raised.value.hint == "did you mean tokens?"


# --- Texts ----------------------------------------------------------------------------------------

HOW: dict[str, Any] = {"tokens": 12, "prompt": "the "}


@pytest.fixture(scope="module")
def run(trained: Path) -> attnlm.Run:
    return attnlm.open_run("single-head", checkpoint_dir=trained / "checkpoints")


def test_sample_yields_one_text_and_samples_returns_several(run: attnlm.Run) -> None:
    pieces = list(attnlm.sample(run, num_samples=1, seed=3, **HOW))
    assert pieces[0] == "the " and len(pieces) > 2
    texts = attnlm.samples(run, num_samples=3, seed=3, **HOW)
    assert texts[0] == "".join(pieces)
    assert len(set(texts)) == 3
    assert all(text.startswith("the ") and len(text) == 16 for text in texts)
    assert attnlm.samples(run, num_samples=1, seed=3, **HOW) == texts[:1]
    prompts = {**HOW, "prompt": ["", "the ", "a"]}
    found = attnlm.samples(run, num_samples=3, seed=3, **prompts)
    assert found[3:6] == texts and len(found) == 9
    assert attnlm.samples(run, seed=3, **prompts) == found[::3]
    assert attnlm.samples(run, **{**HOW, "prompt": []}) == []


def test_a_drawn_seed_is_reported_and_gives_the_same_texts(run: attnlm.Run) -> None:
    events: list[Any] = []
    one = "".join(attnlm.sample(run, **HOW, on_event=events.append))
    several = attnlm.samples(run, num_samples=2, **HOW, on_event=events.append)
    first, second = (int(event.text.removeprefix("seed ")) for event in events)
    assert "".join(attnlm.sample(run, seed=first, **HOW)) == one
    assert attnlm.samples(run, num_samples=2, seed=second, **HOW) == several


# --- What commands print is returned --------------------------------------------------------------


def test_heads_traces_and_reports_are_what_the_commands_show(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(trained)
    about: dict[str, Any] = {"windows": 3, "ablate": True}
    found = attnlm.heads("multi-head", **about)
    flags = ("multi-head", "--windows", "3", "--ablate")
    assert isinstance(found, attnlm.HeadsReport) and len(found.heads) == 2
    assert f"{found}\n" == command("heads", *flags, cwd=trained).stdout
    assert repr(found) == "<HeadsReport of 'multi-head'>"
    traced = attnlm.trace("the fox", "multi-head")
    assert isinstance(traced, attnlm.Trace)
    assert f"{traced}\n" == command("trace", "the fox", "multi-head", cwd=trained).stdout
    gathered = attnlm.report("multi-head", text="the fox", **about)
    assert isinstance(gathered, attnlm.Report) and len(repr(gathered)) < 200
    page = gathered.write_page(tmp_path / "ours.html")
    command("report", *flags, "--text", "the fox", "-o", tmp_path / "theirs.html", cwd=trained)
    assert page.read_bytes() == (tmp_path / "theirs.html").read_bytes()
    (tmp_path / "mine.txt").write_text("the fox jumps")
    measured = attnlm.heads("multi-head", text=str(tmp_path / "mine.txt"))
    assert (measured.windows, measured.window) == (1, 12)
    assert capsys.readouterr() == ("", "")


# --- What is shown --------------------------------------------------------------------------------


def test_runs_data_sets_and_events_are_shown_in_a_line(trained: Path, tmp_path: Path) -> None:
    events: list[object] = []
    (tmp_path / "t.txt").write_text("the quick brown fox. " * 60)
    dataset = attnlm.prepare(tmp_path / "t.txt", data_dir=tmp_path, on_event=events.append)
    run = attnlm.train(dataset, checkpoint_dir=tmp_path, steps=3, on_event=events.append, **SMALL)
    assert repr(run) == f"<Run 'single-head-001': single-head, {run.parameters} parameters>"
    assert repr(dataset).startswith("<Dataset 't-char': 17 ids (char), 1,134 training and 126 ")
    assert len(repr(dataset)) < 100
    kinds = {type(event).__name__ for event in events}
    assert kinds >= {"Progress", "Started", "Evaluated", "Finished"}
    for event in events:
        assert type(event) is getattr(attnlm, type(event).__name__)
        assert "\n" not in repr(event) and len(repr(event)) < 300
