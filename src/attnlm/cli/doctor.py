"""`attnlm doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from attnlm.base.events import Note
from attnlm.cli import console
from attnlm.cli.options import JsonOption

if TYPE_CHECKING:
    from attnlm.experiments.doctor import Finding

_LABEL = 14  # characters


def doctor(
    offline: Annotated[bool, typer.Option("--offline", help="never use the network")] = False,
    json: JsonOption = False,
) -> None:
    """Check this machine: devices, compiler, caches, network, speed."""
    from attnlm.experiments.doctor import doctor as examine

    found: list[Finding] = []
    for finding in _all(examine(offline=offline, on_event=_say)):
        found.append(finding)
        if not json:
            _show(finding)
    remedies = sum(bool(finding.remedy) for finding in found)
    is_fatal = any(finding.is_fatal for finding in found)
    if json:
        console.result_json({"findings": [asdict(finding) for finding in found]})
    elif remedies:
        console.say(
            f"{remedies} {'problem' if remedies == 1 else 'problems'} found, see the → lines; "
            + ("attnlm can't train" * is_fatal or "attnlm still works")
        )
    else:
        console.say("no problems found")
    if is_fatal:
        raise typer.Exit(1)


def _all(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The terminal's in addition, which only the command line knows."""
    from attnlm.experiments.doctor import Finding

    yield from findings
    streams = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name).isatty()]
    colour = "colour" if console.has_colour() else "no colour"
    kind = os.environ.get("TERM") or "TERM is not set"
    columns = shutil.get_terminal_size().columns
    shown = ", ".join(streams) or "none"
    yield Finding("terminal", f"{kind}, {columns} columns, {colour}; connected to it: {shown}")


def _say(event: object) -> None:
    if isinstance(event, Note) and sys.stderr.isatty():
        console.say_aside(event.text)


def _show(finding: Finding) -> None:
    told = console.one_line(console.with_flags(finding.text))
    console.result(f"{finding.name:<{_LABEL}}{told}")
    if finding.remedy:
        remedy = console.one_line(console.with_flags(finding.remedy))
        console.result(f"{'':<{_LABEL}}→ {remedy}")
