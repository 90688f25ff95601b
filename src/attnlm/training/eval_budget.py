"""Choice of the number of tokens per evaluation and per sample, by cost relative to training.

Costs are counted in floating-point operations and follow from the configuration alone, so that the
same run makes the same choices on any machine, even a busy one. Runs with a budget are an
exception: they evaluate as many tokens as their measured speed allows.
"""

from __future__ import annotations

from attnlm.config.settings import Config
from attnlm.model.spec import ModelSpec
from attnlm.training.validation_loss import MOST_TOKENS

# The fractions of the training between two evaluations that an evaluation and its sample may cost.
_EVALUATION_SHARE = 0.1
_SAMPLE_FRACTION = 0.05
# An evaluation of at most _CHEAP operations, about a second, may cost half of this training.
_CHEAP = 1.2e11
_CHEAP_FRACTION = 0.5
# Operations that are always affordable, for an evaluation and for a sample.
_FREE = 2e10
# The fraction of a budget that an evaluation may take if it uses the whole split, or else a part.
_WHOLE_FRACTION = 0.02
_PART_FRACTION = 0.01
# A loss over fewer tokens is too noisy.
_FEWEST_TOKENS = 2**11
_SAMPLED_TOKENS = 80
_FEWEST_SAMPLED = 8
# Operations for the softmax of a logit, its memory traffic included.
_PER_LOGIT = 200.0
# Sampling a token costs as much as this many tokens of a batch, since it reads all weights. Each
# layer's calls add this many operations.
_TIMES_SLOWER_ALONE = 20.0
_PER_LAYER_ALONE = 2e7
# The cost of a step in forward passes: a backward pass costs twice a forward pass.
_STEP_COST = 3.0


def forward_cost(spec: ModelSpec, vocab_size: int) -> float:
    """Return the number of operations of one token's forward pass, including the loss."""
    return float(spec.costs(vocab_size).forward_flops) + _PER_LOGIT * vocab_size


def step_cost(config: Config, vocab_size: int) -> float:
    """Return the number of operations of one training step."""
    return _STEP_COST * config.tokens_per_step * forward_cost(config.spec, vocab_size)


def affordable_eval_tokens(config: Config, vocab_size: int, val_tokens: int) -> int | None:
    """Return the number of tokens that an evaluation uses, or None for the whole split.

    Let T be the cost of the training between two evaluations. The whole split is used if its
    evaluation costs at most `_FREE` operations or at most `_EVALUATION_SHARE` of T. It is also
    used if its evaluation costs at most `_CHEAP` operations and also at most half of T. Otherwise,
    a part of the split is used.
    """
    tokens = min(val_tokens, MOST_TOKENS)
    forward = forward_cost(config.spec, vocab_size)
    training_cost = _cost_between_evaluations(config, vocab_size)
    affordable = _EVALUATION_SHARE * training_cost / forward
    affordable_cost = min(_CHEAP, max(_FREE, _CHEAP_FRACTION * training_cost))
    if tokens <= affordable or tokens * forward <= affordable_cost:
        return None
    fewer = _whole_windows(config, affordable)
    return fewer if fewer < tokens else None


def affordable_tokens_of_budget(config: Config, most: float, val_tokens: int) -> int:
    """Return how many tokens each evaluation of a run with a budget uses.

    `most` is the number of tokens that could be evaluated in the whole budget.
    """
    tokens = min(val_tokens - 1, MOST_TOKENS)
    if tokens <= _WHOLE_FRACTION * most:
        return tokens
    return min(tokens, _whole_windows(config, _PART_FRACTION * most))


def _whole_windows(config: Config, tokens: float) -> int:
    """Return max(`tokens`, `_FEWEST_TOKENS`) rounded down to whole windows, at least one window."""
    length = config.spec.block_size
    return max(1, max(_FEWEST_TOKENS, int(tokens)) // length) * length


def affordable_sample_tokens(config: Config, vocab_size: int) -> int:
    """Return the length of the sample at each evaluation: 80 tokens, fewer for a large model."""
    token_cost = _TIMES_SLOWER_ALONE * forward_cost(config.spec, vocab_size)
    token_cost += config.spec.costs(vocab_size).layers * _PER_LAYER_ALONE
    affordable = max(_SAMPLE_FRACTION * _cost_between_evaluations(config, vocab_size), _FREE)
    return max(_FEWEST_SAMPLED, min(_SAMPLED_TOKENS, int(affordable / token_cost)))


def is_whole_affordable(config: Config, val_tokens: int, steps: int, times: int) -> bool:
    """Return True if evaluating the split `times` times costs little compared to `steps`
    training steps."""
    trained = steps * config.tokens_per_step
    return times * min(val_tokens, MOST_TOKENS) <= _EVALUATION_SHARE * _STEP_COST * trained


def _cost_between_evaluations(config: Config, vocab_size: int) -> float:
    """Return the operations of training between evaluations; 0 if the clock times evaluations."""
    return (config.training.eval_every or 0) * step_cost(config, vocab_size)
