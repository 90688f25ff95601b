"""The exam's tasks, and what is recorded of an exam in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import attnlm
from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.setting_fields import Settings, check_value, read_record, setting
from attnlm.base.suggestions import suggestion
from attnlm.config.variants import variant
from attnlm.runs.ladder_plan import keep_codes, kept_codes

RECORD = "exam.json"
_FORMAT = 1


class Exercise(NamedTuple):
    """A task of the exam: a data set, and how models are trained on it."""

    source: str
    """what `prepare` makes a data set of"""
    sizes: Mapping[str, Any]
    """its options"""
    batch_size: int
    steps: int
    asks: str
    """what the task asks for"""
    learning_rate: float = 0.02


# The standard model gets 40 to 90% of the way in each, and its seeds differ by at most 10 points:
# tools/calibrate_exam.py measures that.
SUITE = {
    "recall": Exercise("recall", {"length": 4}, 128, 160, "which digit followed a letter", 0.008),
    "induction": Exercise("induction", {"length": 8}, 128, 110, "what followed in a chain"),
    "copy": Exercise("copy", {"length": 16}, 32, 60, "the same again"),
    "selective-copy": Exercise("selective-copy", {"length": 10}, 64, 150, "all but the noise"),
    "reverse": Exercise("reverse", {"length": 12}, 32, 80, "the same backwards"),
    "sort": Exercise("sort", {"length": 10}, 64, 150, "letters in order"),
    "running-parity": Exercise("running-parity", {"length": 12}, 64, 80, "a state, step by step"),
    "closing": Exercise("closing", {"length": 12}, 64, 150, "a stack of brackets"),
    "modular-addition": Exercise("modular-addition", {}, 512, 200, "a table of sums"),
    "addition": Exercise("addition", {"digits": 3}, 256, 200, "digits with carries"),
    "facts": Exercise("facts", {"length": 2}, 256, 100, "what training said"),
    "tales": Exercise("tales", {}, 32, 200, "the next letter of stories"),
}
"""The tasks by name; the last is a text, which has no answers."""
_MODEL: Settings = {
    "model": "transformer",
    "positions": "learned",
    "layers": 2,
    "embed_dim": 64,
    "heads": 4,
}


@dataclass(frozen=True, kw_only=True)
class ExamPlan:
    """What an exam trains. An exam that was stopped is resumed with it."""

    candidate: str
    """a variant, or the name of own code as in `mine.py:MyHead`"""
    part: str = ""
    """what the own code is: attention, mlp, scores or model; "" for a variant"""
    codes: Mapping[str, Any] = field(default_factory=dict)
    """the own code (OwnCode) that the candidate names, by its name there"""
    positions: str = "learned"
    """those of the model around a part"""
    tasks: tuple[str, ...] = tuple(SUITE)
    seeds: int = setting("trainings of each model for a task", default=3, at_least=1, at_most=100)
    seed: int = 1
    """the first of the seeds"""

    def check(self) -> None:
        """Raise UsageError for tasks that do not exist, and for numbers out of range."""
        for name in self.tasks:
            if name not in SUITE:
                hint = suggestion(name, SUITE, f"the tasks are {', '.join(SUITE)}")
                raise UsageError(f"the exam has no task {name!r}", hint)
        if not self.tasks:
            raise UsageError("`tasks` is empty", f"name some of {', '.join(SUITE)}")
        check_value(ExamPlan, "seeds", self.seeds)

    @property
    def model(self) -> Settings:
        """The settings of the candidate's model."""
        if not self.part:
            return {**_MODEL, **variant(self.candidate, self.codes)}
        code: Settings = {self.part: self.codes[self.candidate]}
        return code if self.part == "model" else {**_MODEL, "positions": self.positions, **code}

    def write(self, folder: Path) -> None:
        """Write the plan to an exam's folder, with a copy of the own code."""
        plan = {**vars(self), "codes": {name: code.sha256 for name, code in self.codes.items()}}
        about = {"format": _FORMAT, "attnlm": attnlm.__version__}
        files.write_json(folder / RECORD, {**about, **plan})
        keep_codes(self.codes, folder)


STANDARD = ExamPlan(candidate="transformer")
"""The exam whose runs all others are compared with."""


def training_settings(name: str, block_size: int, seed: int) -> Settings:
    """Return the settings of a training on a task, without those of the model."""
    exercise = SUITE[name]
    settings: Settings = {
        "block_size": block_size,
        "batch_size": exercise.batch_size,
        "steps": exercise.steps,
        "eval_every": exercise.steps // 10,
        "eval_tokens": 8192,
        "learning_rate": exercise.learning_rate,
        "schedule": "constant",
        "warmup": 10,
        "seed": seed,
    }
    return settings if name == "tales" else {**settings, "examples_per_window": 1}


def read_plan(path: Path) -> ExamPlan:
    """Return the plan in an exam's folder. Raises AttnlmError, which names a wrong value."""
    path = path / RECORD
    hint = "start a new exam with another `name`"
    plan = read_record(ExamPlan, path, format=_FORMAT, hint=hint)
    try:
        plan = replace(plan, codes=kept_codes(plan.codes, path.parent))
        plan.check()
    except UsageError as error:
        raise AttnlmError(f"{path} is not valid: {error.message}", hint) from None
    return plan
