"""Shell completion: what the scripts of three shells are answered."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from attnlm.base.setting_fields import fields_of
from attnlm.cli.app import root_command
from attnlm.cli.completion import VARIABLE
from attnlm.config.recipes import recipe_names
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import MODELS
from tests.kit import ATTNLM, Done, fails, run_in_new_process, try_command


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the names of runs, a ladder and a data set; completion reads only names."""
    folder = tmp_path_factory.mktemp("project")
    for path in (
        "checkpoints/tiny-001/config.json",
        "checkpoints/ladder-001/ladder.json",
        "checkpoints/$(touch gone)/config.json",
        "checkpoints/.unfinished-a/config.json",
        "elsewhere/other/config.json",
        "data/tales-char/meta.json",
        "data/empty/notes",
    ):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).touch()
    return folder


def asked(project: Path, shell: str, *words: str, **variables: str) -> Done:
    """Return the completions for the last of the words."""
    env = {
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": " ".join(words),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        VARIABLE: f"complete_{shell}",
        **variables,
    }
    rich = {"rich": sys.modules["rich"]} if "rich" in sys.modules else {}
    with contextlib.chdir(project), mock.patch.dict(os.environ, env):
        try:
            return try_command([])
        finally:  # completion takes it away, in a process that has nothing else to do
            del sys.modules["rich"]
            sys.modules.update(rich)


@pytest.mark.parametrize(
    ("words", "expected"),
    {
        "": root_command().list_commands(None),
        "tra": ["train", "trace"],
        "train --mod": ["--model"],
        "train --model ": list(MODELS),
        "train --device c": ["cpu", "cuda"],
        "train --recipe ": recipe_names(),
        "train ": ["tales-char"],
        "train --steps ": [],
        "train --resume ": ["tiny-001"],
        "sample --checkpoint-dir elsewhere ": ["other"],
        "attend hello ": ["tiny-001"],
        "ladder --resume ": ["ladder-001"],
        "ladder --rungs bigram,b": [],
        "ladder --rungs bigram,a": ["bigram,average"],
        "export ": ["tiny-001"],
        "prepare --tokenizer t": ["tales-char", "tiny-001"],
        "diff tiny-001 ": ["tiny-001"],
        "list d": ["datasets"],
        "nonsense --": ["--version", "--install-completion", "--show-completion", "--help"],
        "sample 'unclosed ": [],
    }.items(),
)
def test_words_are_completed_from_options_choices_and_names(
    words: str, expected: list[str], project: Path
) -> None:
    done = asked(project, "bash", "attnlm", *words.split(" "))
    assert done.code == 0 and done.stderr == ""
    shown = done.stdout.split("\n")[:-1] if done.stdout.strip() else []
    assert shown == list(expected)


def test_zsh_and_fish_get_a_line_of_help_with_each(project: Path) -> None:
    zsh = asked(project, "zsh", "attnlm", "--vers")
    assert zsh.stdout == '_arguments \'*: :(("--version":"Show the version and exit."))\'\n'
    fish = asked(project, "fish", "attnlm", "--vers")
    assert fish.stdout == "--version\tShow the version and exit.\n"
    action = {"_TYPER_COMPLETE_FISH_ACTION": "is-args"}
    assert asked(project, "fish", "attnlm", "sample", "", **action).code == 0
    assert asked(project, "fish", "attnlm", "import", "", **action).code == 1  # files then
    assert asked(project, "csh", "attnlm", "").code == 1


def test_every_choice_of_a_setting_is_completed() -> None:
    options = {p.name: p for p in root_command().get_command(None, "train").params}
    for name, record in RECORD_OF.items():
        words = fields_of(record)[name].metadata["choices"] or ()
        found = [item.value for item in options[name].shell_complete(None, "")]
        assert found == list(words), name


def test_neither_torch_nor_rich_nor_other_commands_are_loaded(project: Path) -> None:
    env = {"_TYPER_COMPLETE_ARGS": "attnlm sample ", VARIABLE: "complete_zsh"}
    modules = "torch numpy rich.console tokenizers attnlm.cli.train attnlm.cli.see"
    program = Path(__file__).parents[1] / "programs" / "imports.py"
    through = [sys.executable, str(program)]
    done = run_in_new_process([modules, "0"], project, env=env, through=through)
    assert done.code == 0 and '"tiny-001"' in done.stdout and "gone" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_what_is_installed(shell: str, project: Path, tmp_path: Path) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"there is no {shell} here")
    command = f'"{ATTNLM[0]}" -m attnlm'
    # A shell would become its last command, if that were one of ours.
    both = f"{command} --install-completion; {command} --show-completion; exit"
    run = [program, "-c", both]
    done = run_in_new_process([], project, env={"HOME": str(tmp_path)}, through=run)
    assert done.code == 0 and f"completion for {shell} is in {tmp_path}" in done.stderr
    assert "_attnlm_completion" in done.stdout or "complete --command attnlm" in done.stdout
    script = tmp_path / "script"
    script.write_text(done.stdout)
    assert subprocess.run([program, "-n", script]).returncode == 0
    if shell == "zsh":
        assert "loadautofunc" in (tmp_path / ".zfunc" / "_attnlm").read_text()


def test_another_shell_is_an_error_in_two_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("csh", "/bin/csh"))
    for option in ("--show-completion", "--install-completion"):
        fails(option, cwd=tmp_path, code=2, says="for this shell (csh)", hints="bash, zsh, fish")
