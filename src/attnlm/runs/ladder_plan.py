"""The settings of a ladder, recorded in its folder. A ladder trains several models: its rungs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.base.folders import is_safe_name
from attnlm.base.formatting import listed
from attnlm.base.setting_fields import check_value, quoted, setting
from attnlm.config.settings import Config, check_files, resolve
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.model.own_arguments import PREFIX
from attnlm.runs.plan import Plan
from attnlm.runs.records import DatasetFacts

_SHARED = ("block_size", "batch_size", "steps", "eval_every", "eval_tokens", "threads")
RATE = "learning_rate"
FACTORS = (0.25, 0.5, 1, 2, 4)
"""The learning rates that `tune` tries, as factors of a rung's default."""
_HELD = {
    "tokens": "all rungs make the same steps: `equal` can hold parameters, flops or time instead",
    "parameters": "the width of each rung gives it about as many parameters as the first",
    "flops": "each rung makes the steps that need as many FLOPs as the first with matmuls",
    "time": "each rung makes the steps that take about as long as those of the first",
}
EQUAL = tuple(_HELD)
TOLERANCE = 0.05
"""The difference, as a fraction, up to which rungs count as equal in what `equal` names."""
REPAIR = "start another ladder with a lower rate, as bigram:learning_rate=0.01, or repaired code"
"""What to do about rungs that failed."""


@dataclass(frozen=True, kw_only=True)
class LadderPlan(Plan):
    """The resolved settings of a ladder."""

    KIND, FILE = "ladder", "ladder.json"
    dataset: DatasetFacts
    """its name, path and hashes"""
    rungs: tuple[str, ...]
    seed: int
    block_size: int = 64
    batch_size: int = 32
    prompt: str = setting("text that each model continues; default: none", default="")
    tokens: int = setting(
        "tokens that each model generates; default: 200", default=200, at_least=0, at_most=2**26
    )
    steps: int = 1
    """steps of each run, if its rung has none in `adapted`"""
    eval_every: int | None = None
    eval_tokens: int | None = None
    """validation tokens per evaluation; None for the whole split"""
    threads: int | None = None
    seeds: int = setting(
        "number of seeds, from `seed` on: each model is trained with all of them; 3 or more can "
        "tell a difference from chance; default: 1",
        default=1,
        at_least=1,
        at_most=1000,
    )
    tune: bool = setting(
        "first find the best of five learning rates for each model, by short trainings on a part "
        "of the training split",
        default=False,
    )
    equal: str = setting(
        "what to hold equal in all models; the first decides the widths or steps of the others; "
        "default: tokens",
        default="tokens",
        choices=EQUAL,
    )
    adapted: Mapping[str, Any] = field(default_factory=dict)
    """the settings that a rung has because of `equal` or `tune`, by its name"""
    failed: Mapping[str, str] = field(default_factory=dict)
    """why a rung failed, by its name: training diverged, or its own code raised an error"""

    def settings(self, rung: str, seed: int) -> dict[str, Any]:
        """Return the training settings of a rung for one seed."""
        shared = {key: value for key in _SHARED if (value := getattr(self, key)) is not None}
        return {**shared, **self.adapted.get(rung, {}), "seed": seed, **variant(rung, self.codes)}

    def configs(self) -> dict[str, Config]:
        """Return the configuration of each rung."""
        return {rung: resolve(self.settings(rung, self.seed)) for rung in self.rungs}

    def adapting(self, settings: Mapping[str, Mapping[str, Any]]) -> LadderPlan:
        """Return the plan in which rungs have more settings of their own."""
        adapted = {r: {**self.adapted.get(r, {}), **settings.get(r, {})} for r in self.rungs}
        return replace(self, adapted={rung: own for rung, own in adapted.items() if own})

    @property
    def adaptation(self) -> str:
        """The adapted settings in words: `average: embed_dim 24; multi-head: embed_dim 20`."""
        return "; ".join(
            f"{rung}: {setting.removeprefix(PREFIX)} {value:,}"
            for rung, own in self.adapted.items()
            for setting, value in own.items()
        )

    def notes(self) -> Iterator[str]:
        """Yield sentences on what the rungs have in common, and in what each has its own."""
        yield _HELD[self.equal]
        yield (
            "each rung has the best of five learning rates (1/4 to 4 times its default), each "
            "tried for a fifth of the steps, without the last tenth of the training split, which "
            "measures the loss"
            if self.tune
            else "each rung has its default learning rate, and may prefer another: `tune` finds one"
        )
        if self.adapted:
            yield f"so the rungs have {self.adaptation}"

    def rates(self, rung: str) -> list[float]:
        """Return the learning rates to try for a rung: none if its name or the plan has one."""
        if not self.tune or RATE in {**variant(rung), **self.adapted.get(rung, {})}:
            return []
        usual = resolve(self.settings(rung, self.seed)).training.learning_rate
        return [usual * factor for factor in FACTORS]

    def runs(self, path: Path) -> dict[str, list[Path]]:
        """Return the runs' folders of each rung, by seed. They are next to the ladder's `path`."""
        ends = ["", *(f"-seed-{self.seed + more}" for more in range(1, self.seeds))]
        plain = {rung: re.sub("[:=]", "-", re.sub(r"[^:=]*[/\\]", "", rung)) for rung in self.rungs}
        return {
            rung: [path.with_name(f"{path.name}-{name}{end}") for end in ends]
            for rung, name in plain.items()
        }

    def places(self, path: Path) -> list[Path]:
        """Return the ladder's folder and those of its runs."""
        return [path, *itertools.chain(*self.runs(path).values())]

    def check(self) -> None:
        """Raise UsageError for a rung that does not exist or is named twice, and for numbers out of
        range."""
        check_files(self.codes.values())
        variants = {tuple(sorted(variant(rung, self.codes).items())) for rung in self.rungs}
        if not self.rungs or len(variants) < len(self.rungs):
            raise UsageError(
                "`rungs` is empty or contains a rung twice", "name each rung once: bigram,average"
            )
        names = [paths[-1].name for paths in self.runs(Path(self.FILE)).values()]
        if len({*names}) < len(names) or not all(map(is_safe_name, names)):
            raise UsageError(
                f"the rungs' runs cannot have folders of these names: {listed(names)}",
                "use other and shorter texts in the rungs, without / and *",
            )
        for name, record in SETTINGS.items():
            if record is LadderPlan:
                check_value(LadderPlan, name, getattr(self, name))
        for name, kind in (("failed", str), ("adapted", dict)):
            by_rung = getattr(self, name)
            if any(n not in self.rungs or not isinstance(v, kind) for n, v in by_rung.items()):
                raise UsageError(f"its {name!r} cannot be {quoted(by_rung)}", "")
        for rung in self.rungs:
            resolve(self.settings(rung, self.seed + self.seeds - 1))


SETTINGS: dict[str, type] = {
    **dict.fromkeys(("seeds", "tune", "equal", "prompt", "tokens"), LadderPlan),
    **dict.fromkeys(("budget", "steps", "eval_every", "eval_tokens", "threads"), TrainingConfig),
    "seed": TrainingConfig,
}
"""The record of each setting of a ladder."""
