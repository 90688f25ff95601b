"""Hold parameters or operations of a ladder's rungs equal: find the width or the steps of each."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import replace

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.model.inspection import parameter_count
from attnlm.model.own_specs import OwnModel, size_settings, with_defaults
from attnlm.model.spec import ModelSpec
from attnlm.runs.ladder_plan import TOLERANCE, LadderPlan

_WIDEST = 2**16  # features, beyond which no wider model is tried


def relative_steps(plan: LadderPlan, vocab_size: int) -> dict[str, float]:
    """Return each rung's steps as a multiple of `plan.steps`.

    With `equal` flops, they make as many operations as the first rung that makes any; a rung
    without operations makes `plan.steps`, as all rungs do otherwise.
    """
    flops = dict.fromkeys(plan.rungs, 0)
    untuned = replace(plan, trials=())
    for rung in plan.rungs if plan.equal == "flops" else ():
        config = resolve({}, untuned.settings(rung, plan.seed))
        flops[rung] = config.spec.costs(vocab_size).training_flops * config.tokens_per_step
    reference = next(filter(None, flops.values()), 1)
    return {rung: reference / (per_step or reference) for rung, per_step in flops.items()}


def with_steps(plan: LadderPlan, relative: Mapping[str, float]) -> LadderPlan:
    """Return the plan with the steps of each rung, if they differ: `plan.steps` times a number."""
    if plan.equal != "flops" or plan.steps is None:
        return plan
    steps = {rung: max(1, round(plan.steps * times)) for rung, times in relative.items()}
    return replace(plan, adapted={rung: {"steps": n} for rung, n in steps.items()})


def with_widths(plan: LadderPlan, vocab_size: int) -> LadderPlan:
    """Return the plan in which each rung has about as many parameters as the first.

    Only widths and numbers of heads change, and only where the rung's name does not set them.
    Raises UsageError for a model of the user's that fails with another width.
    """
    if plan.equal != "parameters":
        return plan
    parameters = parameter_count(_resolved_spec(plan.settings(plan.rungs[0], 0)), vocab_size)
    sizes = {
        r: _matching_sizes(plan.settings(r, 0), parameters, vocab_size) for r in plan.rungs[1:]
    }
    return replace(plan, adapted={rung: size for rung, size in sizes.items() if size})


def _resolved_spec(settings: Settings) -> ModelSpec:
    return with_defaults(resolve({}, settings).spec)


def _matching_sizes(settings: Settings, parameters: int, vocab_size: int) -> dict[str, int]:
    """Return the sizes with which a model has about `parameters`; {} for its own sizes."""
    spec = _resolved_spec(settings)
    name, heads = size_settings(spec)
    if name is None or name in settings:
        return {}
    heads = None if spec.preset == "wide-head" else heads  # which do not divide the width
    width, count = (int(spec.settings().get(key or "", 1)) for key in (name, heads))
    # Rotary positions need heads of an even width. The heads of an own model may be unknown.
    even = math.gcd(width // count, 8 if heads is None and isinstance(spec, OwnModel) else 2)
    is_free = heads == "heads" and not {"heads", "kv_heads", "head_size"} & settings.keys()
    others = sorted(range(1, 2 * count + 1), key=lambda n: abs(n - count))[1:] if is_free else []

    def excess(sizes: dict[str, int]) -> float:
        """Return the parameters beyond `parameters`, as a fraction of `parameters`."""
        return parameter_count(_resolved_spec({**settings, **sizes}), vocab_size) / parameters - 1

    best: dict[str, int] = {}
    try:
        for number in (count, *others):
            head_count = {} if number == count else {"heads": number}
            largest = step = number * even
            while largest < _WIDEST and excess({**head_count, name: largest}) < 0:
                largest *= 2
            possible = [{**head_count, name: n} for n in range(step, largest + 1, step)]
            above = bisect.bisect_left(possible, 0.0, key=excess)
            near = [best, *possible[max(0, above - 1) : above + 1]]
            best = min(near, key=lambda sizes: abs(excess(sizes)))
            if abs(excess(best)) <= TOLERANCE:
                break
        _resolved_spec({**settings, **best}).costs(vocab_size)  # runs own code
    except Exception as error:
        raise UsageError(
            f"{spec.name} fails with another width: {type(error).__name__}: {error}",
            "give it an argument heads that divides its width, or name the width in the rung",
        ) from error
    return best
