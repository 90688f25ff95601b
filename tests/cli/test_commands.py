"""The commands in the documents run as written.

Further options cut training to one step of small batches, and budgets to a tenth of a second.
`tales` ends soon. test_learn.py and test_troubleshooting.py run the commands of their pages,
test_readme.py those within sentences.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.kit import command, with_options

ROOT = Path(__file__).parents[2]
NETWORK = ("https:", "hf:", "tinyshakespeare", "/")  # the last: a model of the Hub, for `import`
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
}
"""What a reader of each page has done before."""


def commands(page: str) -> Iterator[tuple[str, ...]]:
    """The arguments of the commands in a page's console blocks, without those that need more."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    # Three pictures of insight.md are about Tiny Shakespeare.
    text, _, _ = text.partition("$ attnlm prepare tinyshakespeare")
    for line in re.findall(r"^\$ (?:cat .* \| )?attnlm (.*)$", text, flags=re.MULTILINE):
        command, *words = shlex.split(line, comments=True)
        from_network = NETWORK if command == "import" else NETWORK[:-1]
        needs_network = command in ("prepare", "import") and any(
            part in word for part in from_network for word in words
        )
        # test_doctor.py and test_processes.py run what takes longer than the rest of a page.
        takes_long = command == "doctor" or (command == "train" and "--processes" in words)
        # After one step, no layer of a transformer changes its stream. test_patch.py runs patch,
        # and test_example_programs.py the examples.
        elsewhere = command == "patch" or any("examples/" in word for word in words)
        if not needs_network and not takes_long and not elsewhere:
            yield command, *words


def shortened(command: Iterable[str]) -> list[str]:
    """The same command, with options that save time."""
    words = [{"RUN": "spare", "OTHER": "tuned"}.get(word, word) for word in command]
    options = {"prepare": ["--offline"], "sample": ["--tokens", "5"]}.get(words[0], [])
    if words[0] in ("train", "ladder") and "--resume" not in words:
        options += ["--budget", "0.1s"] if "--budget" in words else ["--steps", "1"]
    if "--seeds" in words:
        options += ["--seeds", "2"]
    if "--tune" in words:  # five trainings for each rung
        options += ["--rungs", "bigram"]
    if words[0] == "train" and not {"--resume", "--budget", "--processes"} & set(words):
        options += ["--batch-size", "1" if "--dry-run" in words else "4"]
    return with_options(words, *options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the texts that the documents name, of characters that `tales` has."""
    text = "Once there was a little Duck, and Dear Ella found a tiny bell.\n" * 60
    (tmp_path / "notes").mkdir()
    (tmp_path / "stories").mkdir()
    for name in (
        "my-novel.txt",
        "letters.txt",
        "lines.txt",
        "one.txt",
        "two.txt",
        "notes/a.txt",
        "notes/b.md",
    ):
        (tmp_path / name).write_text(text)
    records = "".join(json.dumps({"story": line}) + "\n" for line in text.splitlines())
    (tmp_path / "stories" / "a.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    return tmp_path


@pytest.mark.parametrize("page", BEFORE)
@pytest.mark.usefixtures("few_tales")
def test_the_commands_of_a_page_run(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attnlm.see.ladder_page.panels_png", lambda *_: b""
    )  # test_ladder.py draws it
    monkeypatch.setattr("attnlm.see.ladder_page.panel_svg", lambda *_: "")
    shown = dict.fromkeys(commands(page))
    assert shown
    for line in filter(None, BEFORE[page].split("; ")):
        command(*shortened(line.split()), cwd=folder)
    text = (ROOT / page).read_text(encoding="utf-8")
    for code in re.findall(r"`mine\.py`.*?```py\n(.*?)```", text, flags=re.DOTALL):
        (folder / "mine.py").write_text(code)
    for words in shown:
        shutil.rmtree(folder / "out", ignore_errors=True)  # some pages write it twice
        command(*shortened(words), cwd=folder, stdin="Once there was a Duck.\n" * 200)
