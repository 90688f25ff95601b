"""Options that several commands have, and texts as they were typed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from attnlm.config import help_of
from attnlm.errors import AttnlmError

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
DataDir = Annotated[Path, typer.Option(help="folder of the data sets")]
CheckpointDir = Annotated[Path, typer.Option(help="folder of the runs")]
Checkpoint = Annotated[
    str,
    typer.Option(help="best|last; auto: best, or last while only step 0 was evaluated"),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="check all of the data, not samples of what is over 1 GiB")
]
DeviceOption = Annotated[str, typer.Option(help=help_of("device"))]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", show_default=False, help="name or path; the one trained last unless given"
    ),
]


def typed(argument: str, name: str) -> str:
    """The text of an argument: Python decodes it by the locale, which need not be UTF-8.

    Raises AttnlmError where it is not UTF-8.
    """
    try:
        return decoded(os.fsencode(argument), name)
    except UnicodeEncodeError:  # not typed, but given by a program
        return decoded(argument.encode(errors="surrogatepass"), name)


def decoded(content: bytes, origin: str) -> str:
    """The text of these bytes. Raises AttnlmError where they are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AttnlmError(f"{origin} is not UTF-8", "convert it, then try again") from None
