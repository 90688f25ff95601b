"""What documents and examples tell users to run: it runs, and prints what they show.

Further options cut training to one step of small batches, and budgets to a tenth of a second;
`tales` ends soon. test_readme.py runs the commands within sentences, test_learn.py the course.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import runpy
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import attnlm
from attnlm.base.errors import AttnlmError
from tests.kit import command, try_command
from tests.project.documents import (
    ROOT,
    Shown,
    blocks_of,
    commands_in,
    shortened,
    shown_in,
    text_of,
    write_files,
)

# --- The commands of pages ------------------------------------------------------------------------

NETWORK = ("https:", "hf:", "tinyshakespeare")
BEFORE = {
    "README.md": "",
    "docs/prepare.md": "",
    "docs/train.md": "prepare tales; train --model gpt2 --name gpt2",
    "docs/sample.md": "prepare tales; train",
    "docs/insight.md": "prepare tales; train; train --model bigram; train --model transformer",
    "docs/files.md": "prepare tales; train; train --name spare; "
    "train --from multi-head-001 --name tuned",
    "docs/teach.md": "",
    "docs/import-export.md": "prepare tales; train --model transformer --name my-run; "
    "export my-run my-folder",
    "docs/scale.md": "prepare tales",
    "docs/own-part.md": "",
}
"""What a reader of each page has done before."""


def runs_here(words: list[str]) -> bool:
    """Whether a command needs no network, and no test runs it elsewhere."""
    network = (*NETWORK, "/") if words[0] == "import" else NETWORK  # a model of the Hub
    needs_network = words[0] in ("prepare", "import", "export") and any(
        part in word for part in network for word in words
    )
    # test_doctor.py and test_processes.py run what takes longer than the rest of a page. After one
    # step, no layer of a transformer changes its stream; test_patch.py runs patch.
    elsewhere = words[0] in ("doctor", "patch") or "--processes" in words
    return not needs_network and not elsewhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the texts that the documents name, of characters that `tales` has."""
    text = "Once there was a little Duck, and Dear Ella found a tiny bell.\n" * 60
    (tmp_path / "notes").mkdir()
    (tmp_path / "stories").mkdir()
    names = "my-novel.txt letters.txt lines.txt one.txt two.txt notes/a.txt notes/b.md"
    for name in names.split():
        (tmp_path / name).write_text(text)
    records = "".join(json.dumps({"story": line}) + "\n" for line in text.splitlines())
    np.save(tmp_path / "events.npy", np.arange(3000) % 500)
    (tmp_path / "stories" / "a.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == "README.md" else pytest.mark.documents)
        for page in BEFORE
    ],
)
@pytest.mark.usefixtures("few_tales")
def test_the_commands_of_a_page_run(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_compare.py draws it.
    monkeypatch.setattr("attnlm.see.comparison.picture", lambda *_, **__: b"")
    # Three pictures of insight.md are about Tiny Shakespeare.
    text, _, _ = text_of(page).partition("$ attnlm prepare tinyshakespeare")
    write_files(text, folder)
    for line in filter(None, BEFORE[page].split("; ")):
        command(*shortened(line.split()), cwd=folder)
    shown = [one for one in shown_in(text) if runs_here(one.words)]
    assert shown
    for one in shown:
        words = [{"RUN": "spare", "OTHER": "tuned"}.get(word, word) for word in one.words]
        shutil.rmtree(folder / "out", ignore_errors=True)  # some pages write it twice
        leaks = "leak.py:Leaky" in words
        stdin = "Once there was a Duck.\n" * 200
        done = command(*shortened(words), cwd=folder, stdin=stdin, code=1 if leaks else 0)
        if leaks:  # what other commands print depends on how long they train
            assert one.output and set(one.output) <= set(done.stdout.splitlines())


# --- The errors of troubleshooting.md -------------------------------------------------------------

TROUBLES = shown_in(text_of("docs/troubleshooting.md"))


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, data sets and a run, as a reader of troubleshooting.md may have."""
    folder = tmp_path_factory.mktemp("reader")
    text = "It was a dark and stormy night; the rain fell in torrents.\n" * 60
    (folder / "my-novel.txt").write_text(text)
    (folder / "letters.txt").write_text(text)
    (folder / "latin.txt").write_bytes("Ein schönes Buch.\n".encode("latin-1"))
    command("prepare", "letters.txt", "--tokenizer", "byte", cwd=folder)
    command("prepare", "my-novel.txt", cwd=folder)
    command("train", "--steps", "2", "--seed", "1", cwd=folder)
    return folder


@pytest.mark.documents
@pytest.mark.parametrize("shown", TROUBLES, ids=[shlex.join(one.words) for one in TROUBLES])
def test_a_shown_error_is_what_the_command_prints(
    shown: Shown, readers_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error,) = shown.output
    monkeypatch.chdir(readers_folder)
    done = try_command(shown.words)
    assert done.code in (1, 2) and error in done.stderr.splitlines()


# --- Own parts and models -------------------------------------------------------------------------

OWN_PART = text_of("docs/own-part.md")


@pytest.mark.documents
@pytest.mark.usefixtures("few_tales")
def test_the_programs_of_own_part_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    attnlm.prepare("tales")
    programs = [block for block in blocks_of(OWN_PART, "python") if "import attnlm" in block]
    assert len(programs) == 2
    for number, program in enumerate(programs):
        program = re.sub(r"steps=\d+", "steps=3", program).replace("range(200)", "range(3)")
        path = folder / f"program_{number}.py"  # the source of its classes is read from there
        path.write_text(program.replace("100_000", "1000"))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(str(path), run_name=f"program_{number}")
        assert said.getvalue()


SMALL = ("--steps", 20, "--batch-size", 4, "--block-size", 16, "--eval-tokens", 64, "--seed", 1)
HEADS = {entry.name: entry.command for entry in attnlm.list_heads()}


@pytest.mark.documents
@pytest.mark.parametrize("name", ["lecture", *HEADS])
def test_an_example_or_head_trains_and_is_seen_and_is_short_enough_for_a_lecture(
    name: str, project: Path
) -> None:
    path = ROOT / "examples" / "lecture.py"
    if name in HEADS:
        path = ROOT / "src/attnlm/heads" / f"{name.replace('-', '_')}.py"
    assert name in HEADS or f"examples/{path.name}" in OWN_PART
    content = path.read_text(encoding="utf-8")
    assert len(content.splitlines()) <= 40
    *checks, train = commands_in(content.replace("examples/", f"{ROOT}/examples/"))
    for check in checks:  # tests/model/test_heads.py checks the heads
        said = command(*check, "--block-size", 16, "--json", cwd=project).stdout
        found = {finding["name"]: finding for finding in json.loads(said)["findings"]}
        assert [name for name, finding in found.items() if finding["remedy"]] == []

    command(*train, *SMALL, "--name", name, cwd=project)
    run = attnlm.open_run(name, checkpoint_dir=project / "checkpoints")
    result = run.result()
    assert result is not None and result.last.val_loss < math.log(run.tokenizer.vocab_size)
    assert [file.read_bytes() for file in (run.path / "code").iterdir()] == [path.read_bytes()]
    assert len(command("sample", name, "--tokens", 30, cwd=project).stdout) > 20
    patched = attnlm.patch("3 apples an", "4 pears are", run, answers=("a", "s"))
    heads = patched.heads.shape[1]
    assert (heads == 0) == (name in WITHOUT_HEADS)
    assert heads or patched.attention.shape == (1, len("3 apples an"))
    if name in WITHOUT_MAPS:
        with pytest.raises(AttnlmError, match="no snapshots with scores"):
            attnlm.heads_over_training(run)
    else:
        steps = attnlm.heads_over_training(run).scores["induction"]
        assert steps.shape == (13, 1, heads or 4)  # eleven evaluations, and steps 1 and 3


WITHOUT_MAPS = {
    *("causal-convolution", "differential-attention", "gru", "linear-attention"),
    *("retention", "sigmoid-attention"),
}
"""Heads of the library that compute no softmax of their scores."""
WITHOUT_HEADS = {*WITHOUT_MAPS, "talking-heads"}
"""Those that do not multiply the softmax with the values."""
