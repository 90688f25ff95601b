"""README and docs are true: examples run, commands, recipes, files and links exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import attnlm
from attnlm.config.recipes import recipe_names
from attnlm.model.architecture import MODELS
from docs.generate import commands_page, pages
from tests.kit import try_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
WRITTEN = "\n".join([README, *PAGES.values()])


def test_the_python_example_and_the_commands_that_show_what_it_learned_run(
    few_tales: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    loss, text = capsys.readouterr().out.split("\n", 1)
    assert 1 < float(loss) < 4
    assert text.startswith("Once ") and len(text) == 5 + 100 + 1

    attnlm.train(steps=2, seed=1, embed_dim=8, heads=2)
    shown = README + PAGES["insight.md"] + PAGES["sample.md"]
    commands = re.findall(
        r"`attnlm ((?:attend|heads|trace|report|sample --show-probs)\b[^`]*)`", shown
    )
    named = {command.split()[0] for command in commands}
    assert named == {"attend", "heads", "trace", "report", "sample"}
    for command in commands:
        assert try_command(shlex.split(command)).stdout
    assert all((tmp_path / name).is_file() for name in ("map.png", "page.html"))


def test_every_prompt_can_be_read_by_a_model_of_any_data(few_tales: str) -> None:
    """But for those after the command that prepares Tiny Shakespeare again."""
    before, _, _ = PAGES["insight.md"].partition("$ attnlm prepare tinyshakespeare")
    shown = README + before + PAGES["sample.md"] + PAGES["learn.md"]
    prompts = re.findall(r'attnlm [^\n`]*(?:--prompt|--text|attend|trace) "([^"]+)"', shown)
    assert prompts
    assert set("".join(prompts)) <= set(few_tales)


OTHERS = {
    *("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"),
    *("--local-addr", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--max-restarts"),
    *("--local-dir", "--logdir", "--signal", "--hed", "--rounds", "--processor", "--training"),
    *("--cases", "--n-layer", "--n-head", "--n-embd", "--hidden-size", "--max-steps"),
    *("--max-iters", "--lr", "--config"),
}
"""Options of torchrun, hf, TensorBoard, sbatch, benchmarks and trials, other names of ours, and a
misspelled one."""


def test_every_flag_that_they_name_exists() -> None:
    helps = commands_page()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", WRITTEN)) - OTHERS
    assert {flag for flag in named if not re.search(rf"{flag}\b", helps)} == set()


def test_generated_pages_are_current() -> None:
    for name, content in pages().items():
        assert PAGES[name] == content, f"run `python docs/generate.py`: {name} is out of date"


def test_the_page_of_the_library_has_all_fields_and_no_internal_members() -> None:
    _, *sections = re.split(r"^### (\w+)$", PAGES["library.md"], flags=re.MULTILINE)
    shown = dict(zip(sections[::2], sections[1::2], strict=True))
    classes = [getattr(attnlm, name) for name in attnlm.__all__]
    for value in classes:
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            assert [name for name in names if f"\n{name}: " not in shown[value.__name__]] == []
    assert "append_evaluation" not in shown["Run"]


def test_documents_never_install_a_package_name_that_is_not_ours() -> None:
    """The package is not published, so anybody could register its name."""
    source = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert not re.search(r"\bpipx? install [\"']?attnlm\b", "\n".join([WRITTEN, *source]))


def test_the_version_is_the_same_everywhere() -> None:
    about, changes = ((ROOT / name).read_text("utf-8") for name in ("CITATION.cff", "CHANGELOG.md"))
    (cited, on), (newest, dated) = (
        re.findall(r"^version: (\S+)\ndate-released: (\S+)$", about, flags=re.MULTILINE)[0],
        re.findall(r"^## (\d\S+) \((\S+)\)$", changes, flags=re.MULTILINE)[0],
    )
    assert cited == newest == attnlm.__version__ and on == dated


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in _anchors(path), target


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the headings as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("name", [*MODELS, *recipe_names()])
def test_every_model_and_recipe_is_explained(name: str) -> None:
    assert f"`{name}`" in README + PAGES["train.md"]


def test_the_tour_names_every_subpackage_and_only_what_exists() -> None:
    source = ROOT / "src" / "attnlm"
    tour = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    subpackages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", tour, flags=re.MULTILINE)) == subpackages
    extending = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    text = tour + extending + README
    files = re.findall(r"`([\w/.*]+/[\w.*]+\.(?:py|c|h|html|js|toml|md))`", text)
    assert files
    for file in files:
        assert any(list(folder.glob(file)) for folder in (source, ROOT)), file
