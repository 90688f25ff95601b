"""Runs, attention and progress in a notebook; and the notebook of the ladder."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import shutil
import sys
import xml.etree.ElementTree
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnlm
from docs.run_notebook import NOTEBOOK, PARAMETERS, code_hash
from tests.kit import Terminal, quick_run

train = partial(quick_run, model="single-head:embed_dim=8")
SAVED: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CODE = [cell for cell in SAVED["cells"] if cell["cell_type"] == "code"]


def shown_words(html: str | None) -> str:
    """The text of a page's part, which has to be well-formed."""
    assert html is not None
    return " ".join(xml.etree.ElementTree.fromstring(html).itertext())


def test_a_run_shows_its_facts_and_its_curve(dataset: attnlm.Dataset) -> None:
    run = train(dataset, name="a&b's", steps=3)
    (run.path / "curve.png").write_bytes(b"PNG" * 9)
    html = run._repr_html_()
    best = f"{min(record['val_loss'] for record in run.metrics()):.4f} nats"
    facts = ("a&b's", "single-head", f"{run.parameters:,} parameters", "3 of 3", "uniform", best)
    for words in facts:
        assert words in shown_words(html)
    assert base64.b64encode(b"PNG" * 9).decode() in (html or "")


def test_an_imported_run_is_shown_without_a_training(trained: Path, tmp_path: Path) -> None:
    attnlm.export(trained / "checkpoints" / "transformer", tmp_path / "exported")
    run = attnlm.import_run(tmp_path / "exported", checkpoint_dir=tmp_path)
    words = shown_words(run._repr_html_())
    assert "imported from" in words and "qwen3" in words and "seed" not in words


@pytest.mark.parametrize("content", [b"no JSON\n" * 3, b"\xff\xfe\n", None])
def test_damaged_runs_fall_back_to_the_plain_repr(
    content: bytes | None, trained: Path, tmp_path: Path
) -> None:
    run = attnlm.open_run(shutil.copytree(trained / "checkpoints" / "bigram", tmp_path / "run"))
    metrics = run.path / "metrics.jsonl"
    metrics.unlink()
    if content is None:
        metrics.mkdir()
    else:
        metrics.write_bytes(content)
    assert run._repr_html_() is None


def test_a_run_gives_its_model(trained: Path) -> None:
    run = attnlm.open_run("transformer", checkpoint_dir=trained / "checkpoints")
    model = attnlm.load_model(run, device="cpu")[0]
    assert not model.training and {p.device.type for p in model.parameters()} == {"cpu"}
    attention = attnlm.attend("the dog", run, checkpoint="last")
    assert repr(attention) == "<Attention of 'transformer'>"


def test_evaluations_are_printed_as_lines_without_a_terminal(
    dataset: attnlm.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(dataset, on_event=attnlm.ProgressBar())
    out, err = capsys.readouterr()
    *evaluations, last = err.splitlines()
    assert out == ""
    assert [int(line.split()[1]) for line in evaluations] == [r["step"] for r in run.metrics()]
    best = min(run.metrics(), key=lambda record: float(record["val_loss"]))
    said = f"best validation loss {best['val_loss']:.4f}, of step {best['step']}"
    assert last == f"{run.name}: finished at step 4; {said}"


def test_the_last_line_replaces_the_bar_in_a_terminal(
    dataset: attnlm.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = attnlm.ProgressBar()
    bar(attnlm.Note("\x1b[2Jnoted"))
    train(dataset, on_event=bar)
    assert "\\x1b[2Jnoted\n" in shown.getvalue()
    assert "4/4 [" in shown.getvalue() and "validation " in shown.getvalue()
    assert shown.getvalue().count("\n") == 2
    assert "finished at step 4" in shown.getvalue().split("\r")[-1]


def test_the_last_line_replaces_the_bar_in_a_notebook(
    dataset: attnlm.Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[dict[str, str]] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool = False) -> Any:
        shown.append(content)
        return SimpleNamespace(update=display)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    bar = attnlm.ProgressBar()
    bar(attnlm.Progress("read <b>", 5, 10, "chars"))
    assert "read <b>:  50%" in shown_words(shown[-1]["text/html"])
    bar(attnlm.Progress("read <b>", 10, 10, "chars"))
    assert shown[-1] == {"text/plain": "", "text/html": ""}  # no timing stays in the notebook
    train(dataset, on_event=bar)
    bar(attnlm.Note("noted"))
    assert any("4/4 [" in content["text/plain"] for content in shown)
    assert shown[-1] == {"text/plain": "", "text/html": ""}
    finished, noted = capsys.readouterr().out.splitlines()
    assert "finished at step 4" in finished and noted == "noted"


def test_events_are_printed_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("the quick brown fox. " * 60)
    dataset = attnlm.prepare(tmp_path / "t.txt", data_dir=tmp_path / "data", on_event=print)
    run = train(dataset, on_event=print)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "read: 1,260 chars" and "chars (100%)" in "\n".join(lines)
    assert any(line.startswith(f"{run.name}: single-head, ") for line in lines)
    record = run.metrics()[-1]
    (last,) = (line for line in lines if line.startswith("step      4  train"))
    assert f"train {record['train_loss']:.4f}  validation {record['val_loss']:.4f}" in last
    assert lines[-1] == f"{run.name}: finished at step 4"
    stepped = str(attnlm.Stepped(20, loss=2.5, tokens_per_second=5000.0, seconds_left=852.0))
    assert re.fullmatch(r"step     20  batch 2\.5000 +5,000 tokens/s +14 min left", stepped)
    assert stepped.index("tokens/s") == last.index("tokens/s")
    assert str(attnlm.Finished(run, 4, True)).endswith("at step 4, because of `patience`")


def test_saved_outputs_match_the_code() -> None:
    assert SAVED["metadata"]["attnlm"]["outputs_of"] == code_hash(SAVED), "run `make notebook`"
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {output["output_type"] for cell in CODE for output in cell["outputs"]}
    assert kinds == {"stream", "display_data", "execute_result"}  # no error
    assert all(o.get("name") != "stderr" for cell in CODE for o in cell["outputs"])
    shown = json.dumps([cell["outputs"] for cell in CODE])
    assert not re.search(r"seconds|tokens/s| ms\b", shown), "timings differ each time"
    assert NOTEBOOK.stat().st_size < 500_000


@pytest.mark.documents
@pytest.mark.usefixtures("few_tales")
def test_the_code_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells in this process with few steps and without pandas."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    sources = ["".join(cell["source"]) for cell in CODE]
    assert sources[0] == PARAMETERS
    names: dict[str, Any] = {}
    shown: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for source in ["STEPS = 2", *sources[1:]]:
            *statements, last = ast.parse(source).body
            rest = [] if isinstance(last, ast.Expr) else [last]
            exec(compile(ast.Module([*statements, *rest], []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                result = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                kinds = ("_repr_html_", "_repr_png_", "__repr__")
                shown += [next(getattr(result, k) for k in kinds if hasattr(result, k))()]
    assert len(shown) > 6 and all(shown)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} > {"transformer-001"}


@pytest.mark.slow
def test_a_kernel_reproduces_the_saved_numbers(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra notebook")
    pytest.importorskip("ipykernel", reason="needs the extra notebook")
    from docs.run_notebook import execute, read

    notebook = read()
    execute(notebook, tmp_path)

    def losses(cells: list[Any]) -> list[float]:
        text = json.dumps([cell["outputs"] for cell in cells if cell["cell_type"] == "code"])
        return [float(loss) for loss in re.findall(r"best validation loss (\d\.\d+)", text)]

    assert len(losses(SAVED["cells"])) >= 6
    assert losses(notebook["cells"]) == pytest.approx(losses(SAVED["cells"]), abs=0.05)
