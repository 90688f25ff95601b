"""`python docs/generate.py`: writes cli.md and library.md, which follow from the program.

With `--course`, it also takes the steps of learn.md, and writes its figures and those of teach.md.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attnlm
from attnlm.cli.app import root_command
from attnlm.cli.options import SHOWS_ALL
from attnlm.runs.journal import EvaluationRecord, Snapshot
from attnlm.runs.ladder_plan import LadderPlan
from attnlm.runs.run import Checkpoint, Result
from attnlm.see.heads import HeadReport
from attnlm.see.pictures import Grid
from attnlm.see.trace import Operation
from attnlm.see.verdicts import Pair
from attnlm.workflows.export import Exported

_FOLDER = Path(__file__).parent
_NOTE = "<!-- Written by `python docs/generate.py`: edit the program instead. -->\n"
_WIDTH = 100  # characters of a line
_RETURNED = (
    Checkpoint,
    EvaluationRecord,
    Exported,
    Grid,
    HeadReport,
    LadderPlan,
    Operation,
    Pair,
    Result,
    Snapshot,
)
"""Classes without a public name of which public functions return objects."""
_INTERNAL = {
    "Batches": {"starts"},
    "Checkpoint": {"header"},
    "LadderPlan": {"adapting", "check", "grid", "runs", "settings", "write"},
    "ProgressBar": {"begin", "clear", "close", "note"},
    "Run": {
        "alone",
        "append_evaluations",
        "discard_after",
        "facts",
        "kept",
        "save_config",
    },
}
"""Members that only the package itself uses."""


def main() -> None:
    """Write the pages."""
    written = pages()
    if "--course" in sys.argv:
        from docs import course

        with tempfile.TemporaryDirectory() as folder:
            course.take_steps(Path(folder))
            figures = course.measured(Path(folder))
        for name in ("learn.md", "teach.md"):
            written[name] = course.filled((_FOLDER / name).read_text(encoding="utf-8"), figures)
    for name, content in written.items():
        (_FOLDER / name).write_text(content, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the pages by their names in docs/."""
    return {"cli.md": commands_page(), "library.md": library_page()}


def commands_page() -> str:
    """Return a page with `--help` of every command."""
    root = root_command.__wrapped__()  # a new one: commands remember how they were first asked
    top = root.context_class(
        root,
        info_name="attnlm",
        max_content_width=_WIDTH,
        terminal_width=_WIDTH,
        **root.context_settings,
    )
    sections = ["# Commands\n", _NOTE, _block(root.get_help(top))]
    for name in root.list_commands(top):
        command = root.get_command(top, name)
        context = command.context_class(command, info_name=name, parent=top)
        context.meta[SHOWS_ALL] = True
        sections += [f"## {name}\n", _block(command.get_help(context))]
    return "\n".join(sections)


def library_page() -> str:
    """Return a page with the docstrings, signatures and fields of all public names."""
    found = {name: getattr(attnlm, name) for name in attnlm.__all__ if not name.startswith("_")}
    functions = [name for name, value in found.items() if inspect.isfunction(value)]
    sections = ["# The library\n", _NOTE, _doc(attnlm), "## Functions\n"]
    for name in functions:
        sections += [f"### {name}\n", _block(_signature(name, found[name])), _doc(found[name])]
    classes = [*(found[name] for name in found if name not in functions), *_RETURNED]
    sections.append("## Classes\n")
    for value in classes:
        sections += [f"### {value.__name__}\n", *_calls(value), _doc(value), *_fields(value)]
        sections += _members(value)
    return "\n".join(sections)


def _calls(value: type) -> Iterator[str]:
    """Yield how a class that is not a dataclass is made, and how its objects are called."""
    if "__init__" in vars(value) and not dataclasses.is_dataclass(value):
        yield _block(_signature(value.__name__, vars(value)["__init__"]).removesuffix(" -> None"))


def _fields(value: type) -> Iterator[str]:
    """Yield one block with the public fields of a dataclass and what is written below each."""
    hidden, lines = _INTERNAL.get(value.__name__, set()), []
    for owner in reversed(value.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for node, below in zip(definition.body, [*definition.body[1:], None], strict=True):
            name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else "_"
            if isinstance(node, ast.AnnAssign) and not name.startswith("_") and name not in hidden:
                is_plain = node.value is None or isinstance(node.value, ast.Constant)
                lines.append(ast.unparse(node if is_plain else _without_value(node)))
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    text = " ".join(str(below.value.value).split())
                    lines += textwrap.wrap(
                        text, _WIDTH - 4, initial_indent="    ", subsequent_indent="    "
                    )
    if lines:
        yield _block("\n".join(lines))


def _without_value(node: ast.AnnAssign) -> ast.AnnAssign:
    """Return a field without its default, if that is more than a constant."""
    return ast.AnnAssign(node.target, node.annotation, None, node.simple)


def _members(value: type) -> Iterator[str]:
    """Yield a class's own public methods and properties that have a docstring."""
    hidden = _INTERNAL.get(value.__name__, set())
    for name, member in vars(value).items():
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            title = f"{name}: {inspect.signature(getter).return_annotation}"  # type: ignore[arg-type]
        elif inspect.isfunction(member):
            title = _signature(name, member)
        else:
            continue
        if not name.startswith("_") and name not in hidden and inspect.getdoc(member):
            yield _block(title)
            yield _doc(member)


def _signature(name: str, function: Any) -> str:
    """Return a signature without `self`: on one line if it fits, else one line per parameter."""
    signature, empty = inspect.signature(function), inspect.Parameter.empty
    parts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        part = str(parameter.replace(annotation=empty, default=empty))
        if parameter.annotation is not empty:
            part += f": {parameter.annotation}"
        if parameter.default is not empty:
            part += f" = {parameter.default!r}"
        parts.append(part)
    parts = parts[1:] if parts[:1] == ["self"] else parts
    end = f") -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return line
    return "".join([f"{name}(\n", *(f"    {part},\n" for part in parts), end])


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _doc(value: Any) -> str:
    return (inspect.getdoc(value) or "").rstrip() + "\n"


if __name__ == "__main__":
    main()
