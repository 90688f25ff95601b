"""`python docs/generate.py`: writes cli.md and library.md, which follow from the program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attnlm
from attnlm.cli.app import root_command

_FOLDER = Path(__file__).parent
_NOTE = "<!-- Written by `python docs/generate.py`: edit the program instead. -->\n"
_WIDTH = 100  # characters of a line


def main() -> None:
    """Writes the pages."""
    for name, content in pages().items():
        (_FOLDER / name).write_text(content, encoding="utf-8")


def pages() -> dict[str, str]:
    """The pages by their names in docs/."""
    return {"cli.md": commands_page(), "library.md": library_page()}


def commands_page() -> str:
    """What `--help` says of every command."""
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
        sections += [f"## {name}\n", _block(command.get_help(context))]
    return "\n".join(sections)


def library_page() -> str:
    """The docstrings of the package and of all its public names."""
    found = {name: getattr(attnlm, name) for name in attnlm.__all__ if not name.startswith("_")}
    functions = [name for name, value in found.items() if inspect.isfunction(value)]
    sections = ["# The library\n", _NOTE, _doc(attnlm), "## Functions\n"]
    for name in functions:
        sections += [f"### {name}\n", _block(_signature(name, found[name])), _doc(found[name])]
    sections.append("## Classes\n")
    for name in (name for name in found if name not in functions):
        sections += [f"### {name}\n", _doc(found[name]), *_members(found[name])]
    return "\n".join(sections)


def _members(value: type) -> Iterator[str]:
    """A class's own public methods and properties that have a docstring."""
    for name, member in vars(value).items():
        if isinstance(member, property | functools.cached_property):
            title = name
        elif inspect.isfunction(member):
            title = _signature(name, member)
        else:
            continue
        if not name.startswith("_") and inspect.getdoc(member):
            yield _block(title)
            yield _doc(member)


def _signature(name: str, function: Any) -> str:
    """Without `self`: on one line if it fits, else with one for each parameter."""
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
