"""What a ladder was asked for, as its folder records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.config.settings import resolve
from attnlm.config.variants import folder_name, variant

RECORD = "ladder.json"
_FORMAT = 1
_MOST_TOKENS, _LARGEST_SEED = 2**26, 2**63
_OPTIONAL = ("steps", "eval_every", "eval_tokens", "threads")


@dataclass(frozen=True)
class Plan:
    """What a ladder was asked for, settled: its record, from which it goes on."""

    dataset: str
    dataset_path: str
    train_sha256: str
    val_sha256: str
    rungs: tuple[str, ...]
    seed: int
    block_size: int
    batch_size: int
    prompt: str
    tokens: int
    steps: int | None = None
    """None while the first rung of a ladder with a budget still decides."""
    eval_every: int | None = None
    budget: float | None = None
    """Seconds for all rungs, where they were given in place of steps."""
    eval_tokens: int | None = None
    """What evaluations take of the validation split, where that is not all."""
    threads: int | None = None

    def settings(self, rung: str) -> dict[str, Any]:
        """What is given to a rung's training."""
        alike = ("seed", "block_size", "batch_size", *_OPTIONAL)
        given = {key: getattr(self, key) for key in alike}
        return {**variant(rung), **{k: v for k, v in given.items() if v is not None}}

    def write(self, folder: Path) -> None:
        """Records it in a ladder's folder."""
        facts = {**asdict(self), "rungs": list(self.rungs)}
        content = {"format": _FORMAT, "attnlm": attnlm.__version__, "plan": facts}
        files.write_json(folder / RECORD, content)


def run_path(path: Path, rung: str) -> Path:
    """The folder of a rung's run, beside the ladder's own."""
    return path.with_name(f"{path.name}-{folder_name(rung)}")


def read_plan(path: Path) -> Plan:
    """The record in a ladder's folder. Raises AttnlmError when it is missing or damaged."""
    content = files.read_json(path / RECORD)
    facts = content.get("plan")
    if isinstance(facts, dict):
        facts = {**dict.fromkeys(_OPTIONAL), **facts}  # which older versions did not have
    if (
        content.get("format") != _FORMAT
        or not isinstance(facts, dict)
        or facts.keys() != _KINDS.keys()
    ):
        raise AttnlmError(
            f"{path / RECORD} was written by another version of attnlm", "use that version"
        )
    try:
        if not all(type(facts[key]) in kinds for key, kinds in _KINDS.items()):
            raise UsageError("a fact has another type", "")
        made = Plan(**{**facts, "rungs": checked_rungs(facts["rungs"])})
        if not (0 <= made.tokens <= _MOST_TOKENS and 0 <= made.seed < _LARGEST_SEED):
            raise UsageError("a number is out of range", "")
        "".join((made.dataset, made.dataset_path, made.prompt)).encode()  # no half surrogate pairs
        for rung in made.rungs:
            resolve(made.settings(rung))
    except (UsageError, UnicodeEncodeError):
        raise _damaged(path / RECORD) from None
    return made


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("dataset", "dataset_path", "train_sha256", "val_sha256", "prompt"), (str,)),
    **dict.fromkeys(("seed", "block_size", "batch_size", "tokens"), (int,)),
    "rungs": (list,),
    "budget": (float, type(None)),
    **dict.fromkeys(_OPTIONAL, (int, type(None))),
}


def check_tokens(tokens: int) -> None:
    """Raises UsageError for more than a record may have."""
    if tokens > _MOST_TOKENS:
        raise UsageError(f"`tokens` can't be {tokens:,}", f"give {_MOST_TOKENS:,} or fewer")


def checked_rungs(rungs: Sequence[str]) -> tuple[str, ...]:
    """The same as a tuple. Raises UsageError for one that does not exist, and one named twice."""
    meant = {tuple(sorted(variant(rung).items())) for rung in rungs}
    if not rungs or len(meant) < len(rungs):
        raise UsageError(
            "`rungs` is empty or names a rung twice", "name each once, as in bigram,average"
        )
    return tuple(rungs)


def _damaged(path: Path) -> AttnlmError:
    return AttnlmError(
        f"{path} is damaged, or was not written by attnlm",
        "start another ladder, with another `name`",
    )
