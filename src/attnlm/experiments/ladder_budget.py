"""How long the rungs of a ladder train: as asked for, or in their shares of a budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnlm.base.events import OnEvent
from attnlm.base.settings import Setting
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.config.variants import variant
from attnlm.data.dataset import Dataset
from attnlm.experiments.budget import Budget, Planned, planned
from attnlm.experiments.settle import check_fits, settle
from attnlm.runs.ladder_plan import Plan
from attnlm.training.deadline import Deadline, Pace
from attnlm.training.price import affordable_tokens

# Seconds in which a rung says something and the page is drawn, and their share of the budget: the
# smaller one.
_SPEAKING, _SPEAKING_SHARE = 0.8, 0.015
_SHORTEST = 0.1
# The first rung leaves so many times what the others are to take: they must not be cut short.
_SPARE = 1.5
# By how much a ladder may end too late, for equal numbers of steps: the larger one.
_LATE, _LATE_SHARE = 3.0, 0.05


@dataclass
class LadderBudget:
    """The time of a ladder, shared by the rungs that are still to be trained."""

    plan: Planned
    paces: dict[str, Pace]
    """of these rungs"""

    def deadline(self, rung: str, made: Plan) -> Deadline:
        """By when the next rung is to end. Only the first may make more steps than planned.

        The others make fewer only where the ladder would end much too late: it compares its rungs
        after the same number of steps.
        """
        whole, first = self.plan.deadline, len(self.paces) == len(self.plan.paces)
        pace, now = self.paces.pop(rung), time.perf_counter()
        speaking = len(self.plan.paces) * min(_SPEAKING, _SPEAKING_SHARE * whole.budget)
        left = whole.ends - speaking - now
        own, others = (_seconds(made, *p) for p in ([pace], self.paces.values()))
        if first:
            share = left * own / (own + _SPARE * others)
        else:
            late = max(_LATE, _LATE_SHARE * whole.budget)
            left = max(left + late, late)
            share = max(left - others, left * own / (own + others))
        return replace(
            whole,
            ends=now + share,
            budget=max(share, _SHORTEST),
            pace=pace,
            eval_every=whole.eval_every if first else made.eval_every,
            most_steps=None if first else made.steps,
        )


def _seconds(made: Plan, *paces: Pace) -> float:
    """What the steps of a ladder, with their evaluations, take at these paces together."""
    evaluations = 1 + made.steps / made.eval_every
    return sum(made.steps * pace.step + evaluations * pace.evaluation for pace in paces)


def settled(
    dataset: Dataset,
    rungs: Sequence[str],
    alike: Mapping[str, Setting],
    began: float,
    on_event: OnEvent,
) -> tuple[TrainingConfig, LadderBudget | None]:
    """Steps and evaluations that all rungs share: as asked for, or as the budget has time for.

    Raises AttnlmError as `planned` does.
    """
    configs = [resolve({**alike, **variant(rung)}) for rung in rungs]
    training = configs[0].training
    device = choose_device(training.device, training.dtype)
    for config in configs:
        check_fits(config, dataset, device)
    if training.budget is None:
        if training.eval_tokens is None:
            sizes = dataset.vocab_size, dataset.val_tokens
            parts = [affordable_tokens(config, *sizes) for config in configs]
            part = min((part for part in parts if part is not None), default=None)
            training = replace(training, eval_tokens=part)
        return training, None
    with keeping_threads():
        configs = [settle(config, device, dataset).config for config in configs]
        plan = planned(configs, dataset, device, Budget(training.budget, began), on_event)
    return plan.training, LadderBudget(plan, dict(zip(rungs, plan.paces, strict=True)))
