"""The exam's tasks, and what is recorded of an exam in its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings, check_value, setting
from attnlm.base.suggestions import suggestion
from attnlm.config.settings import resolve
from attnlm.config.variants import variant
from attnlm.runs.plan import Plan


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
    longer: bool = False
    """If set, the models are scored on questions 1.5 times as long as those in training. They have
    no positions: learned ones are of no use beyond those that were trained."""


# The standard model gets 40 to 90% of the way in each, and its seeds differ by at most 10 points:
# tools/calibrate_exam.py measures that.
SUITE = {
    "recall": Exercise("recall", {"length": 4}, 256, 120, "which digit followed a letter", 0.01),
    "recall-many": Exercise("recall", {"length": 8}, 128, 240, "the same among more", 0.012),
    "induction": Exercise("induction", {"length": 8}, 128, 110, "what followed in a chain"),
    "copy": Exercise("copy", {"length": 16}, 32, 60, "the same again"),
    "selective-copy": Exercise("selective-copy", {"length": 10}, 64, 150, "all but the noise"),
    "reverse": Exercise("reverse", {"length": 12}, 32, 80, "the same backwards"),
    "sort": Exercise("sort", {"length": 10}, 64, 150, "letters in order"),
    "running-parity": Exercise("running-parity", {"length": 12}, 64, 80, "a state, step by step"),
    "closing": Exercise("closing", {"length": 12}, 64, 150, "a stack of brackets"),
    "modular-addition": Exercise("modular-addition", {}, 512, 200, "a table of sums"),
    "addition": Exercise("addition", {"digits": 3}, 256, 300, "digits with carries", 0.01),
    "facts": Exercise("facts", {"length": 2}, 256, 100, "what training said"),
    "tales": Exercise("tales", {}, 32, 200, "the next letter of stories"),
    "sort-longer": Exercise("sort", {"length": 10}, 64, 150, "order beyond training", longer=True),
    "closing-longer": Exercise(
        "closing", {"length": 12}, 64, 220, "brackets beyond training", longer=True
    ),
    "induction-longer": Exercise(
        "induction", {"length": 8}, 128, 300, "chains beyond training", longer=True
    ),
}
"""The tasks by name, of which one is a text."""
TEXT = "tales"
_EVALUATIONS = 10
_MODEL: Settings = {
    "model": "transformer",
    "positions": "learned",
    "layers": 2,
    "embed_dim": 64,
    "heads": 4,
}


@dataclass(frozen=True, kw_only=True)
class ExamPlan(Plan):
    """What an exam trains."""

    KIND, FILE = "exam", "exam.json"
    candidate: str
    """a variant, or the name of own code as in `mine.py:MyHead`"""
    part: str = ""
    """what the own code is: attention, mlp, scores or model; "" for a variant"""
    positions: str = "learned"
    """those of the model around a part"""
    tasks: tuple[str, ...] = field(default_factory=lambda: tuple(SUITE))
    seeds: int = setting("trainings of each model for a task", default=3, at_least=1, at_most=100)
    seed: int = 1
    """the first of the seeds"""
    steps: int | None = setting("steps of each training; default: the task's", at_least=1)

    def check(self) -> None:
        """Raise UsageError for tasks that do not exist, and for numbers out of range."""
        for name in self.tasks:
            if name not in SUITE:
                hint = suggestion(name, SUITE, f"the tasks are {', '.join(SUITE)}")
                raise UsageError(f"the exam has no task {name!r}", hint)
        if not self.tasks or len({*self.tasks}) < len(self.tasks):
            raise UsageError("`tasks` is empty or contains a task twice", "name each task once")
        if self.part and self.candidate not in self.codes:
            raise UsageError(f"{self.candidate!r} is not code", "name a file, or a head")
        check_value(ExamPlan, "seeds", self.seeds)
        if self.steps is not None:
            check_value(ExamPlan, "steps", self.steps)
        for seed in (self.seed, self.seed + self.seeds - 1):
            resolve({**self.model(self.tasks[0]), "seed": seed})

    def model(self, task: str) -> Settings:
        """Return the settings of the candidate's model in a task."""
        around = {**_MODEL, "positions": "none" if SUITE[task].longer else self.positions}
        if not self.part:
            return {**around, **variant(self.candidate, self.codes)}
        code: Settings = {self.part: self.codes[self.candidate]}
        return code if self.part == "model" else {**around, **code}


STANDARD = ExamPlan(candidate="transformer")
"""The exam whose runs all others are compared with."""


def trainings(
    task: str, block_size: int, seeds: Iterable[int], steps: int | None = None
) -> dict[str, Settings]:
    """Return the settings of the trainings on a task by name, without those of the model."""
    exercise = SUITE[task]
    settings: Settings = {
        "block_size": block_size,
        "batch_size": exercise.batch_size,
        "steps": steps or exercise.steps,
        "eval_every": max(1, (steps or exercise.steps) // _EVALUATIONS),
        "eval_tokens": 8192,
        "learning_rate": exercise.learning_rate,
        "schedule": "constant",
        "warmup": min(10, steps or exercise.steps),
    }
    if task != TEXT:
        settings = {**settings, "examples_per_window": 1}
    suffix = "" if steps is None else f"-of-{steps}-steps"
    return {f"{task}-seed-{seed}{suffix}": {**settings, "seed": seed} for seed in seeds}
