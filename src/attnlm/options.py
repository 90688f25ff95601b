"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnlm.config import help_of

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")]
DataDir = Annotated[Path, typer.Option(help="folder of the data sets")]
CheckpointDir = Annotated[Path, typer.Option(help="folder of the runs")]
Checkpoint = Annotated[str, typer.Option(help="which of the run's checkpoints: best|last")]
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
