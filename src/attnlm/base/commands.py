"""Commands as one types them in the current folder.

Hints name commands, so this module knows flags; no other below the command line does, but for
see/reproduce.py, which writes down the commands of a run.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.names import is_safe_name, latest_name

# Of each kind of folder: a file that it has, the folder that it lies in by default, the flag that
# names another, and how one is made.
KINDS = {
    "run": ("config.json", "checkpoints", "--checkpoint-dir", "train one: attnlm train"),
    "ladder": ("ladder.json", "checkpoints", "--checkpoint-dir", "start one: attnlm ladder"),
    "data set": ("meta.json", "data", "--data-dir", "prepare one: attnlm prepare"),
}


def how_to_make(kind: str, parent: Path) -> str:
    """A hint at how to make the first folder of that kind in `parent`."""
    return " ".join([KINDS[kind][-1], *map(shlex.quote, elsewhere(parent, kind))])


def elsewhere(parent: Path, kind: str = "run") -> list[str]:
    """The flag that says that things of that kind lie in `parent`; none where that is the default.

    `parent` is compared with the default folder as both are seen from the current one.
    """
    _, usual, flag, _ = KINDS[kind]
    return [] if parent.absolute() == Path(usual).absolute() else [flag, str(parent)]


def command_for(
    command: str, folder: Path, *flags: str, kind: str = "run", named: bool = False
) -> str:
    """A command about a run, ladder or data set, as one types it in the current folder.

    The newest in the default folder has no name, unless `named` or where the command ends in a
    flag that needs one.
    """
    words = command.split()
    if not is_safe_name(folder.name):  # it can only be given by its path
        return shlex.join([*words, str(folder), *flags])
    place = elsewhere(folder.parent, kind)
    if named or place or words[-1].startswith("--") or not _is_latest(folder):
        words.append(folder.name)
    return shlex.join([*words, *flags, *place])


def _is_latest(folder: Path) -> bool:
    try:
        return latest_name(folder.parent) == folder.name
    except (AttnlmError, OSError):
        return False


def resume_command(run: Path) -> str:
    """What resumes a run."""
    return command_for("attnlm train --resume", run)


def flag(name: str) -> str:
    """A setting as it is typed: `embed_dim` → `--embed-dim`."""
    return "--" + name.replace("_", "-")
