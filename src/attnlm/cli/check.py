"""`attnlm check`: what holds for a part or a model of the user's own, and what does not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

import attnlm
from attnlm.base.setting_fields import fields_of
from attnlm.cli import completion, console, options
from attnlm.cli.options import REQUIRED, argument, option, with_options
from attnlm.config.settings import RECORD_OF
from attnlm.model.architecture import Architecture

GROUPS = {"Model": [*fields_of(Architecture), "set_"]}
COMMON = ("model", "embed_dim", "block_size", "heads", "positions", "set_")


@with_options({name: record for name, record in RECORD_OF.items() if record is Architecture})
def check(
    code: str = argument(REQUIRED, "FILE.py:NAME", "a class or function of your own"),
    *,
    part: str | None = option(
        None,
        "what it is: attention|mlp|scores|model; default: as its arguments tell",
        completion.choice_completer("attention", "mlp", "scores", "model"),
    ),
    vocab_size: int = option(65, "size of the vocabulary"),
    set_: list[str] | None = options.SET,
    json: bool = options.JSON,
    **settings: Any,
) -> None:
    """Check code of your own: does it fit, is it causal, what does it cost?

    A part maps (B, T, C) to (B, T, C), or queries and keys to scores. A model maps ids (B, T) to
    logits. The code is run, on random ids and on the CPU.
    """
    settings = options.typed_settings(settings, set_)
    checks = attnlm.check(code, part=part, vocab_size=vocab_size, **settings)
    findings = console.collect_findings(checks, show=not json)
    problems = [finding for finding in findings if finding.remedy]
    if json:
        console.print_json({"findings": [asdict(finding) for finding in findings]})
    elif problems:
        count = f"{len(problems)} {'thing' if len(problems) == 1 else 'things'} to look at"
        console.say(f"{count} (see the → lines)")
    else:
        console.say("all of it holds")
    if any(finding.is_fatal for finding in findings):
        raise typer.Exit(1)
