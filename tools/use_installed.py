"""`python -m tools.use_installed`: uses the package that this environment has installed.

`make newest` runs it with the newest versions of all dependencies, `make package` with the wheel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import attnlm
from attnlm.cli.app import root_command
from docs.generate import commands_page
from tests.kit import Done, try_command

_ROOT = Path(__file__).parent.parent
_PROGRAM = Path(sys.executable).parent / "attnlm"
_MODEL = f"{_ROOT / 'examples' / 'lecture.py'}:LectureModel"
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_FIRST: tuple[tuple[str, ...], ...] = (
    ("prepare", "tales"),
    ("train", "--steps", "20", "--seed", "1"),
    ("sample", "--tokens", "50", "--seed", "1"),
)
_OTHERS: tuple[tuple[str, ...], ...] = (
    ("eval",),
    ("check", _MODEL),
    ("train", "--model", _MODEL, "--block-size", "32", "--steps", "5", "--name", "lecture"),
    ("train", "--attention", "echo", "--steps", "5", "--seed", "1", "--name", "own", "--quiet"),
    ("exam", "alibi", "--tasks", "copy", "--quick"),
    ("sample", "own", "--tokens", "9"),
    ("ladder", "--rungs", "bigram,single-head", "--steps", "5", "--seed", "1", "--tokens", "9"),
    ("attend", "the fox", "multi-head-001", "--output", "attention.png"),
    ("trace", "the fox", "multi-head-001"),
    ("heads", "multi-head-001", "--windows", "2"),
    ("patch", "the fox", "the dog", "multi-head-001", "--answers", "a", "e", "-o", "patch.png"),
    ("report", "multi-head-001", "--windows", "2", "--output", "report.html"),
    ("export", "multi-head-001", "page.html", "--to", "html"),
    ("train", "--model", "transformer", "--steps", "5", "--seed", "1", "--quiet"),
    ("export", "transformer-001", "folder"),
    ("import", "folder", "--name", "imported"),
    ("compare", "transformer-001", "own"),
    ("train", "--dry-run"),
    ("list",),
    ("list", "heads"),
    ("doctor",),
)
_PAGES = ("report.html", "page.html")


def main() -> None:
    """Exit with an error if a command fails. All work is done in a folder that is then removed."""
    place = Path(attnlm.__file__).parent
    if place.parent.name != "site-packages":
        sys.exit(f"attnlm is in {place}, not installed: unset PYTHONPATH")
    # Versions of Typer arrange the help in other ways.
    shown, documented = commands_page(), (_ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    different = {*_OPTION.findall(shown)} ^ {*_OPTION.findall(documented)}
    assert not different, f"options differ from those in docs/cli.md: {different}"
    names = root_command().list_commands(None)
    assert {*names} == {command[0] for command in (*_FIRST, *_OTHERS)}, names
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["ATTNLM_CONFIG_DIR"] = folder
        for command in (("--version",), *_FIRST):
            print("attnlm", *command, flush=True)
            if subprocess.run([_PROGRAM, *command]).returncode:
                sys.exit("failed")
        # A new process for each command would load PyTorch each time.
        for name in ("", *names):
            assert "Usage: attnlm" in _done(*[name] * bool(name), "--help").stdout
        has_transformers = importlib.util.find_spec("transformers") is not None
        for command in _OTHERS:
            if "folder" in command and not has_transformers:
                missing = try_command(command)
                assert missing.code == 1 and missing.stderr.count("\n") == 2, missing
                continue
            _done(*command)
        for page in map(Path, _PAGES):
            assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>"), page
        wrong = try_command(["train", "--heads", "four"])
        assert wrong.code == 2 and "--heads" in wrong.stderr, wrong
        assert "train" in _completed("attnlm tra").split()


def _done(*command: str) -> Done:
    """Run a command in this process; exit with an error if the command fails."""
    print("attnlm", *command, flush=True)
    done = try_command(command)
    if done.code or done.fault():
        sys.exit(f"failed with exit code {done.code}:\n{done.stdout}{done.stderr}")
    return done


def _completed(words: str) -> str:
    """Return the words that bash receives to complete the last of `words`."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    asked["_ATTNLM_COMPLETE"] = "complete_bash"
    done = subprocess.run([_PROGRAM], env={**os.environ, **asked}, check=True, capture_output=True)
    return done.stdout.decode()


if __name__ == "__main__":
    main()
