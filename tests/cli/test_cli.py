"""The command line from outside: exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import pytest

from attnlm import __version__
from attnlm.__main__ import main
from attnlm.base.errors import UsageError
from attnlm.base.process import Interrupted
from attnlm.config.settings import parse_seconds
from attnlm.model.architecture import RUNGS
from attnlm.runs.run import open_run
from attnlm.training.step import Stepper
from tests import own_code
from tests.kit import (
    Done,
    command,
    fails,
    run_in_new_process,
    try_command,
)

TEXT = "the quick brown fox jumps over the lazy dog.\nso the dog naps; the fox jumps on.\n" * 40
TRAIN = len(TEXT) * 9 // 10
VAL = len(TEXT) - TRAIN
PROGRAMS = Path(__file__).parents[1] / "programs"
QUICK = ["--steps", "6", "--block-size", "8", "--batch-size", "4", "--seed", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `text.txt` was prepared and a small model trained on it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "text.txt").write_text(TEXT)
    command("prepare", "text.txt", cwd=folder)
    command("train", *QUICK, "--name", "small", cwd=folder)
    return folder


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_from_text_to_text(rung: str, project: Path) -> None:
    trained = command("train", "--model", rung, *QUICK, "--json", cwd=project)
    facts = json.loads(trained.stdout)
    assert trained.stdout.count("\n") == 1
    higher = RUNGS[RUNGS.index(rung) + 1 :]
    best = "attnlm train --recipe best --budget 2m"
    assert (f"attnlm train --model {higher[0]}" if higher else best) in trained.stderr
    assert facts["model"] == rung and facts["step"] == 6
    assert Path(facts["run"]).parts == ("checkpoints", f"{rung}-001")
    assert facts["dataset"] == "data/text-char"

    measured = json.loads(command("eval", facts["run"], "--json", cwd=project).stdout)
    assert measured["val_loss"] == pytest.approx(facts["val_loss"], rel=1e-5)
    assert measured["evaluated_tokens"] == VAL - 1

    sampled = command("sample", "--tokens", "30", "--seed", "3", cwd=project)
    assert len(sampled.stdout) == 30
    assert f"{rung}-001" in sampled.stderr


def test_version_and_no_command(tmp_path: Path) -> None:
    assert command("--version", cwd=tmp_path).stdout == f"attnlm {__version__}\n"
    assert "Start here:" in command(cwd=tmp_path).stdout


def test_nothing_opens_a_socket(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(self: socket.socket, *arguments: object, **how: object) -> None:
        raise AssertionError("a socket is opened")

    monkeypatch.setattr(socket.socket, "__init__", opened)
    with pytest.raises(AssertionError, match="a socket is opened"):
        socket.create_connection(("127.0.0.1", 9))
    command("train", *QUICK, "--name", "alone", cwd=project)
    command("train", "--resume", "alone", "--steps", "8", cwd=project)
    for name in ("sample", "eval", "report"):
        command(name, "alone", cwd=project)


COMMANDS = (
    *("prepare", "train", "ladder", "sample", "eval", "attend", "trace", "heads", "patch"),
    *("report", "list", "compare", "import", "export", "check", "doctor"),
)
WITHOUT_TORCH = (
    *(
        "0 prepare text.txt",
        "0 list",
    ),
    *("1 train nowhere", "1 train --resume nowhere", "1 train --dry-run nowhere"),
    *("1 ladder nowhere", "1 sample nowhere", "1 eval nowhere", "1 heads nowhere"),
    *("1 report nowhere", "1 attend a nowhere", "1 trace a nowhere", "1 import no/such/place"),
    *("2 eval --device x", "2 heads --windows 0", "2 export a --to b", "2 ladder --rungs a"),
    "2 train --heads 3",
)
"""Exit codes and commands."""


def test_help_and_commands_that_compute_nothing_load_no_torch(project: Path) -> None:
    through = [sys.executable, str(PROGRAMS / "imports.py")]
    helped = ["0 --help", *(f"0 {name} --help" for name in COMMANDS)]
    done = run_in_new_process(["torch numpy rich", *helped], project, through=through)
    assert done.code == 0, done.stderr
    assert done.stdout.count("Usage: attnlm") == len(helped)
    done = run_in_new_process(["torch", *WITHOUT_TORCH], project, through=through)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_sleep_soon_unless_the_user_said_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads this when torch is loaded, which the command line does later."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("attnlm.cli.exits.run_and_exit", lambda command: None)
    main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


SAME = ["train", "--model", "single-head", "--dropout", "0.2", "--name", "same", *QUICK]


@pytest.fixture(scope="module")
def elsewhere(project: Path) -> Done:
    """The command SAME in a process of its own, with another hash seed and in a locale of ASCII."""
    own_code.written(project)
    env = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env |= {"PYTHONIOENCODING": "latin-1"}
    through = [sys.executable, str(PROGRAMS / "training.py")]
    done = run_in_new_process(
        [*SAME, "--checkpoint-dir", "process-ζ"], project, env=env, through=through
    )
    assert done.code == 0, done.stderr
    return done


@pytest.mark.usefixtures("elsewhere", "whole_snapshots")
def test_the_same_command_writes_the_same_bytes_in_any_process(project: Path) -> None:
    command(*SAME, "--checkpoint-dir", "process-0", cwd=project)
    for name in ("best.safetensors", "last.safetensors", "ticker.jsonl", "config.json"):
        one, other = (project / f"process-{which}" / "same" / name for which in "0ζ")
        assert one.read_bytes() == other.read_bytes(), name


def test_output_is_utf8_in_any_locale(tmp_path: Path, elsewhere: Done) -> None:
    assert "process-ζ/same\n" in elsewhere.stdout
    (tmp_path / "ζ.txt").write_text("αβγδε ζητα " * 60, encoding="utf-8")
    command("prepare", "ζ.txt", cwd=tmp_path)
    command("train", *QUICK, cwd=tmp_path)
    in_ascii = "αβ".encode().decode("ascii", "surrogateescape")
    done = command("sample", "--prompt", in_ascii, "--tokens", "4", cwd=tmp_path)
    assert done.stdout.startswith("αβ") and len(done.stdout) == 6
    wrong = {"says": "--prompt is not UTF-8", "hints": "convert"}
    fails("sample", "--prompt", os.fsdecode(b"\xff"), cwd=tmp_path, code=1, **wrong)


def test_prepare_reports_and_prints_the_folder(project: Path) -> None:
    done = command("prepare", "text.txt", cwd=project)
    assert Path(done.stdout.strip()) == Path("data/text-char")
    for word in (
        f"{len(TEXT):,} characters",
        f"vocabulary of {len(set(TEXT))} ",
        f"{TRAIN:,} for training",
        "bigram",
        "attnlm train",
    ):
        assert word in done.stderr
    facts = json.loads(command("prepare", "text.txt", "--json", cwd=project).stdout)
    assert facts["characters"] == len(TEXT) and facts["val_tokens"] == VAL
    assert facts["floor"] is None and 0 < facts["bigram_loss"] < 3.3
    quiet = command("prepare", "text.txt", "--name", "quiet", "--quiet", cwd=project)
    assert (quiet.stdout, quiet.stderr) == ("data/quiet\n", "")
    (project / "data" / "latest").write_text("text-char\n")


def test_train_reports_progress_and_the_next_command(project: Path) -> None:
    done = command("train", *QUICK, cwd=project)
    run = done.stdout.strip()
    assert (project / run / "last.safetensors").is_file()
    for word in ("parameters", "cpu", "seed 1", "validation", "ln V", "attnlm sample", run):
        assert word in done.stderr
    assert " |*" not in done.stderr


def test_quiet_commands_name_no_command_to_type_next(project: Path) -> None:
    rungs = ["--rungs", "bigram", "--steps", "1", "--seed", "1"]
    for words in (
        ["prepare", "text.txt", "--name", "silent"],
        ["train", "text-char", *QUICK],
        ["ladder", "text-char", *rungs],
        ["sample", "small", "--tokens", "5", "--seed", "1"],
        ["sample", "small", "--tokens", "5", "--seed", "1", "--num-samples", "2"],
    ):
        loud = command(*words, cwd=project)
        quiet = command(*words, "-q", cwd=project)
        assert quiet.stdout and len(quiet.stderr) < len(loud.stderr), words
        assert "next  " not in quiet.stderr, words
        assert words[0] == "ladder" or "next  attnlm" in loud.stderr, words
        assert words[0] != "sample" or quiet.stderr == "", words
        assert words[0] != "train" or "baselines" in quiet.stderr, words
    (project / "data" / "latest").write_text("text-char\n")


def test_the_ladder_from_outside(project: Path) -> None:
    flags = ["--rungs", "bigram,multi-head", "--steps", "4", "--seed", "1", "--prompt", "the "]
    done = command("ladder", *flags, "--tokens", "9", "--name", "steps", cwd=project)
    page = project / done.stdout.strip()
    assert page == project / "checkpoints" / "steps" / "index.html" and page.is_file()
    header = next(line for line in done.stderr.splitlines() if line.startswith("group   "))
    assert header.split()[1:3] == ["validation", "loss"] and header.endswith("runs")
    for words in (
        "rung 2 of 2: multi-head",
        "not a fair comparison: not only the model differs: optimizer",
        "── multi-head\nthe ",
    ):
        assert words in done.stderr

    facts = json.loads(command("ladder", "--resume", "steps", "--json", cwd=project).stdout)
    assert [rung["name"] for rung in facts["groups"]] == ["bigram", "multi-head"]
    assert facts["ladder"]["steps"] == 4 and facts["page"] == "checkpoints/steps/index.html"
    assert all(len(rung["text"]) == 9 for rung in facts["groups"])
    shown = done.stderr.splitlines()
    for rung in facts["groups"]:
        row = next(line for line in shown if line.startswith(f"{rung['name']}  "))
        (run,) = rung["runs"].values()
        assert f"{rung['mean']:.4f}" in row and f"{run['parameters']:,}" in row

    # What the page says makes it again does.
    text = page.read_text(encoding="utf-8")
    tagged = text.split('<pre class="command">')[1].split("</pre>")[0]
    again_by = html.unescape(re.sub("<[^>]*>", "", tagged))
    again = json.loads(command(*shlex.split(again_by)[1:], "--json", cwd=project).stdout)
    assert again["ladder"]["path"] != facts["ladder"]["path"]
    for one, other in zip(again["groups"], facts["groups"], strict=True):
        assert (one["mean"], one["text"]) == (other["mean"], other["text"])


def test_print_config_and_config_json_are_recipes_of_the_same_run(project: Path) -> None:
    flags = ["--heads", "2", "--embed-dim", "6", "--learning-rate", "0.01", *QUICK]
    printed = command("train", *flags, "--print-config", cwd=project).stdout
    assert tomllib.loads(printed)["heads"] == 2
    (project / "mine.toml").write_text(printed)
    assert (
        command("train", "--recipe", "mine.toml", "--print-config", cwd=project).stdout == printed
    )
    run = command("train", "--recipe", "mine.toml", cwd=project).stdout.strip()
    again = command("train", "--recipe", f"{run}/config.json", "--print-config", cwd=project).stdout
    resolved = ("device", "dtype", "compile", "processes")
    one, other = (
        {name: value for name, value in tomllib.loads(recipe).items() if name not in resolved}
        for recipe in (printed, again)
    )
    assert one == other


def test_a_recipes_unused_keys_and_other_tokenizer_are_named(project: Path) -> None:
    flags = ["--recipe", "r2-multi-head", "--model", "average", *QUICK]
    done = command("train", *flags, cwd=project)
    assert "ignoring the recipe's heads" in done.stderr and "made for" not in done.stderr
    done = command("train", "--recipe", "r4-gpt2-windows", *QUICK, cwd=project)
    note = "the recipe was made for --tokenizer gpt2, but text-char was prepared with char"
    assert done.stderr.splitlines().count(note) == 1


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        (90, "90; 90s; 90 sec; 1.5m; 1m30s; 1 min 30 sec"),
        (1.5, "1.5"),
        (0.5, "0.5 seconds"),
        (300, "5m; 5min; 5 Minutes;  5 mins "),
        (7200, "2h; 120m; 2hrs; 2 hours"),
        (3600, "1 hour"),
        (5400, "1h30m"),
        (3661, "1h 1m 1s"),
        (3601, "1h1s"),
    ],
)
def test_a_time_is_understood_as_people_write_it(seconds: float, texts: str) -> None:
    for text in texts.split(";"):
        assert parse_seconds(text) == seconds, text


@pytest.mark.parametrize(
    "text", ["", " ", "0", "0m", "-5", "m", "5x", "5 mm", "1h30", "30s1m", "1:30", "1e3", "9" * 400]
)
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid value for `budget`") as caught:
        parse_seconds(text)
    assert "1h30m" in caught.value.hint


def test_the_next_command_after_a_small_text_works(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:200])
    done = command("prepare", "text.txt", cwd=tmp_path)
    assert "the default context: the validation split has 20 tokens" in done.stderr
    (following,) = re.findall("^next  attnlm (.*)$", done.stderr, flags=re.MULTILINE)
    assert following == "train --block-size 19"
    command(*following.split(), "--steps", "1", cwd=tmp_path)


def test_a_stopped_preparation_says_that_nothing_was_written(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr("attnlm.data.prepare.write_dataset", stopped)
    done = command("prepare", "text.txt", "--name", "cut", cwd=project, code=130)
    assert done.stderr == "stopped; nothing was written\n"
    assert not (project / "data" / "cut").exists()


def test_a_signal_saves_and_says_how_to_go_on(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.step

    def interrupted(stepper: Stepper, **options: Any) -> Any:
        if stepper.state.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(stepper, **options)

    monkeypatch.setattr(Stepper, "step", interrupted)
    code = 128 + signal.SIGTERM
    done = command("train", *QUICK, "--name", "stopped", cwd=project, code=code)
    assert "next  attnlm train --resume stopped\n" in done.stderr
    run = open_run("stopped", checkpoint_dir=project / "checkpoints")
    assert run.checkpoint("last").step == 4


def test_sampling_prints_text_and_nothing_else(project: Path) -> None:
    done = command("sample", "small", "--prompt", "the ", "--tokens", "20", cwd=project)
    assert done.stdout.startswith("the ") and len(done.stdout) == 24
    read = r"small, best checkpoint \(step \d+, validation loss \d\.\d{4}\) on cpu, temperature 1, "
    assert re.match(rf"{read}seed \d+\n", done.stderr) and "tokens/s" in done.stderr
    piped = command(
        "sample", "small", "--prompt", "-", "--tokens", "0", cwd=project, stdin="dog\n\n"
    )
    assert piped.stdout == "dog\n"  # without the newline that `echo` adds
    wrong = command("sample", "small", "--prompt", "Ü", cwd=project, code=1)
    assert wrong.stderr.startswith("error: the vocabulary of text-char lacks 'Ü'")


def test_json_of_samples_has_each_text_and_its_checkpoint(project: Path) -> None:
    flags = ["small", "--tokens", "9", "--seed", "2", "--json"]
    facts = json.loads(command("sample", *flags, cwd=project).stdout)
    assert len(facts["texts"][0]) == facts["generated_tokens"] == 9 and facts["seed"] == 2
    assert facts["checkpoint"] == "best" and facts["step"] > 0
    several = json.loads(command("sample", *flags, "--num-samples", "3", cwd=project).stdout)
    assert several["texts"][:1] == facts["texts"] and several["generated_tokens"] == 27
    assert len(set(several["texts"])) == 3 and {len(text) for text in several["texts"]} == {9}


def test_a_conversation_ends_with_bye_or_the_end_of_input(project: Path) -> None:
    flags = ["sample", "small", "-i", "--tokens", "5", "--seed", "1"]
    bye = command(*flags, cwd=project, stdin="the dog\n/bye\nnever read\n")
    assert len(bye.stdout) == 6
    ended = command(*flags, cwd=project, stdin="the dog\nÜ\nfox\n")
    assert len(ended.stdout) == 12
    assert "lacks 'Ü'" in ended.stderr
    prompted = command(*flags, "--prompt", "Ü", cwd=project, stdin="the dog\n")
    assert "lacks 'Ü'" in prompted.stderr and prompted.stdout == bye.stdout
    last = command(*flags[:-1], f"{2**63 - 1}", cwd=project, stdin="the dog\nfox\n")
    assert len(last.stdout) == 12


def test_next_lines_name_a_run_that_is_not_the_newest(project: Path) -> None:
    command("train", *QUICK, "--name", "older", cwd=project)
    command("train", *QUICK, "--name", "newer", cwd=project)
    longer = command("train", "--resume", "older", "--steps", "8", cwd=project)
    assert longer.stderr.endswith("next  attnlm sample older --tokens 500\n")
    sampled = command("sample", "newer", "--tokens", "1", cwd=project)
    assert sampled.stderr.endswith("next  attnlm report\n")
    sampled = command("sample", "older", "--tokens", "1", cwd=project)
    assert sampled.stderr.endswith("next  attnlm report older\n")
    away = project / "away"
    away.mkdir()
    (project / "checkpoints" / "older").rename(away / "older")
    for arguments in (["away/older"], ["older", "--checkpoint-dir", "away"]):
        sampled = command("sample", *arguments, "--tokens", "1", cwd=project)
        assert sampled.stderr.endswith("next  attnlm report older --checkpoint-dir away\n")
    longer = command("train", "--resume", "away/older", "--steps", "9", cwd=project)
    assert longer.stderr.endswith("next  attnlm sample older --tokens 500 --checkpoint-dir away\n")


def test_a_closed_pipe_is_not_an_error(project: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.chdir(project), os.fdopen(writer, "w") as stdout:
        done = try_command(["sample", "small", "--tokens", "30"], streams={"stdout": stdout})
    assert done.code == 0 and "BrokenPipe" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_of_folders_need_not_be_unicode(project: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xff")
    shutil.copytree(project / "data", tmp_path / name)
    run = tmp_path / "checkpoints" / name
    sizes = ["--model", "transformer", "--layers", "1", "--heads", "2", "--embed-dim", "16"]
    command("train", *sizes, *QUICK, "--name", "odd", cwd=project)
    shutil.move(project / "checkpoints" / "odd", run)
    command("report", run, "--windows", "1", cwd=tmp_path)
    assert r"r\udcff" in (run / "report.html").read_text(encoding="utf-8")
    assert r"r\udcff" in command("trace", "the", run, "--as-code", cwd=tmp_path).stdout
    (tmp_path / f"{name}.txt").write_text("the quick " * 60)
    done = command("prepare", f"{name}.txt", "--tokenizer", run, cwd=tmp_path)
    assert done.stdout == "data/r-r\n"
    command("ladder", "r-r", "--rungs", "bigram", "--steps", "1", cwd=tmp_path)
    command("export", run, "x", cwd=tmp_path)


def test_only_a_closed_stdout_is_an_error(project: Path) -> None:
    with contextlib.chdir(project):
        for words in ("prepare text.txt", "sample small --prompt - --tokens 3"):
            closed = dict.fromkeys(("stdin", "stderr"))  # as Python shows them
            assert try_command(words.split(), streams=closed).code == 0
            done = try_command(words.split(), streams={"stdout": None})
            assert done.code == 1 and "error: cannot write the output: Bad file" in done.stderr


def test_a_file_that_the_locale_cannot_name_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    def opened(run: str, **others: object) -> None:
        raise UnicodeEncodeError(sys.getfilesystemencoding(), "é.py", 0, 1, "not in range(128)")

    monkeypatch.setattr("attnlm.open_run", opened)
    done = command("sample", "small", cwd=project, code=1)
    assert "'é.py'" in done.stderr and "PYTHONUTF8=1" in done.stderr


def test_a_name_too_long_for_any_system_is_an_invalid_argument(project: Path) -> None:
    for words in (["prepare", "text.txt"], ["train"], ["ladder"], ["train", "--dry-run"]):
        fails(*words, "--name", "a" * 4000, cwd=project, code=2, says="--name", hints="use letters")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no non-blocking pipes")
def test_non_blocking_pipes_lose_no_output(project: Path) -> None:
    prompt = "the dog naps; " * 20_000  # more than a pipe holds
    (stdin, typing), (reading, stdout) = os.pipe(), os.pipe()
    for end in (stdin, stdout):
        os.set_blocking(end, False)

    def read_late(file: TextIO) -> str:
        time.sleep(0.1)
        return file.read()

    def type_late() -> None:
        time.sleep(0.1)
        with os.fdopen(typing, "w") as file:
            file.write(prompt)

    with ThreadPoolExecutor() as threads, os.fdopen(reading) as reader:
        threads.submit(type_late)
        read = threads.submit(read_late, reader)
        with os.fdopen(stdin) as ours, os.fdopen(stdout, "w") as theirs, contextlib.chdir(project):
            words = ["sample", "small", "--prompt", "-", "--tokens", "0"]
            done = try_command(words, streams={"stdin": ours, "stdout": theirs})
        assert done.code == 0, done.stderr
        assert read.result() == prompt


def test_a_deleted_working_folder_is_named(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        done = try_command(["list"])
    assert (done.code, done.fault()) == (1, None)
    assert "error: the current folder: No such file or directory" in done.stderr
