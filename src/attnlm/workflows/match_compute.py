"""Give a model about as many parameters as another has."""

from __future__ import annotations

import bisect
import math
from dataclasses import replace

from attnlm.base.errors import UsageError
from attnlm.base.setting_fields import Settings
from attnlm.config.settings import resolve
from attnlm.model.architecture import Architecture
from attnlm.model.own_arguments import with_defaults
from attnlm.model.own_specs import OwnModel, size_settings
from attnlm.model.spec import ModelSpec, parameter_count
from attnlm.runs.ladder_plan import TOLERANCE, LadderPlan

_MLPS = ("gelu", "relu2", "swiglu")
_WIDEST = 2**16  # features, beyond which no wider model is tried


def with_widths(plan: LadderPlan, vocab_size: int) -> LadderPlan:
    """Return the plan in which each rung has about as many parameters as the first.

    Only widths and numbers of heads change, and only where the rung's name does not set them.
    Raises UsageError for a model of the user's that fails with another width.
    """
    first, *others = plan.rungs
    wanted = parameter_count(_spec(plan.settings(first, 0)), vocab_size)
    return plan.adapting({r: _sizes(plan.settings(r, 0), wanted, vocab_size) for r in others})


def with_mlp_width(settings: Settings, wanted: int, vocab_size: int) -> Settings:
    """Return settings in which the MLP's width gives the model about `wanted` parameters.

    They stay as they are if they name a width, if there is no MLP of ours, if the parameters are
    about equal already, and if the width would be less than half of the usual one, or twice it.
    """
    spec = _spec(settings)
    count = parameter_count(spec, vocab_size)
    is_equal = abs(count / wanted - 1) <= TOLERANCE
    if is_equal or not isinstance(spec, Architecture) or spec.mlp_width or spec.mlp not in _MLPS:
        return settings
    wider = replace(spec, mlp_width=spec.mlp_dim + 1)
    excess = (count - wanted) / (parameter_count(wider, vocab_size) - count)
    width = spec.mlp_dim - round(excess)
    is_near = spec.mlp_dim <= 2 * width <= 4 * spec.mlp_dim
    return {**settings, "mlp_width": width} if is_near else settings


def _spec(settings: Settings) -> ModelSpec:
    return with_defaults(resolve({}, settings).spec)


def _sizes(settings: Settings, wanted: int, vocab_size: int) -> Settings:
    """Return the sizes with which a model has about `wanted` parameters; {} for its own sizes."""
    spec = _spec(settings)
    name, heads = size_settings(spec)
    if name is None or name in settings:
        return {}
    heads = None if spec.preset == "wide-head" else heads  # which do not divide the width
    width, count = (int(spec.settings().get(key or "", 1)) for key in (name, heads))
    # Rotary positions need heads of an even width. The heads of an own model may be unknown.
    even = math.gcd(width // count, 8 if heads is None and isinstance(spec, OwnModel) else 2)
    is_free = heads == "heads" and not {"heads", "kv_heads", "head_size"} & settings.keys()
    others = sorted(range(1, 2 * count + 1), key=lambda n: abs(n - count))[1:] if is_free else []

    def excess(sizes: Settings) -> float:
        """Return the parameters beyond those wanted, as a fraction of those."""
        return parameter_count(_spec({**settings, **sizes}), vocab_size) / wanted - 1

    best: Settings = {}
    try:
        for number in (count, *others):
            head_count: Settings = {} if number == count else {"heads": number}
            widest = step = number * even
            while widest < _WIDEST and excess({**head_count, name: widest}) < 0:
                widest *= 2
            possible = [{**head_count, name: n} for n in range(step, widest + 1, step)]
            above = bisect.bisect_left(possible, 0.0, key=excess)
            near = [best, *possible[max(0, above - 1) : above + 1]]
            best = min(near, key=lambda sizes: abs(excess(sizes)))
            if abs(excess(best)) <= TOLERANCE:
                break
        _spec({**settings, **best}).costs(vocab_size)  # runs own code
    except Exception as error:
        raise UsageError(
            f"{spec.name} fails with another width: {type(error).__name__}: {error}",
            "give it an argument heads that divides its width, or name the width in the rung",
        ) from error
    return best
