"""The schedule of a run: its learning rate, when it evaluates and ends, and how much is evaluated.

A run follows its steps or, within a budget, the clock. How much is evaluated is counted in
floating-point operations and follows from the configuration alone, its device included, so that
the same run makes the same choices on any machine, even a busy one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from attnlm.compute.processes import ALONE, Processes
from attnlm.config.settings import Config
from attnlm.config.training import TrainingConfig
from attnlm.runs.journal import EARLY_STEPS
from attnlm.training.state import TrainingState

# Of a longer split, only the first MOST_TOKENS tokens are evaluated; commands say so.
MOST_TOKENS = 2**22


def learning_rate(step: int, config: TrainingConfig, steps: float | None = None) -> float:
    """Return the rate of the update that led to `step`, or of the first update if `step` is 0.

    The rate rises linearly over `warmup` steps and then stays constant. At the end, unless
    `schedule` is constant, the rate falls towards `min_learning_rate`; the fall takes the fraction
    `cooldown` of the steps after the warm-up. `steps` is the number of steps of the run; default:
    `config.max_steps`. Within a budget, the warm-up takes at most a quarter of the steps.
    """
    made = max(0, step - 1)
    highest = config.learning_rate
    warmup = float(config.warmup)
    steps = config.max_steps if steps is None else steps
    if config.budget is not None:
        warmup = min(warmup, steps / 4)
    if made < warmup:
        return highest * ((made + 1) / (warmup + 1))
    falling = config.cooldown * (steps - warmup)
    remaining = (steps - made) / falling if config.schedule != "constant" else 1.0
    if remaining >= 1:
        return highest
    lowest = config.min_learning_rate / highest
    is_linear = config.schedule == "linear"
    height = remaining if is_linear else (1 - math.cos(math.pi * remaining)) / 2
    return highest * (lowest + (1 - lowest) * height)


# --- How much is evaluated ------------------------------------------------------------------------

# The largest fraction of the training between two evaluations that an evaluation costs. In a run of
# steps, about a second of two cores, _CHEAP operations, is always allowed.
_EVALUATION_SHARE = 0.1
_CHEAP = 1.2e11
# A loss over fewer tokens is too noisy to choose the best checkpoint by.
_FEWEST_TOKENS = 2**11
_OPERATIONS_PER_SECOND = 1e11
"""An assumed speed, at which a budget is counted in operations."""
_CUDA_FACTOR = 100
"""How many times as fast a CUDA GPU is assumed to be."""
# Operations for the softmax of a logit, its memory traffic included.
_PER_LOGIT = 200.0
# The cost of a step in forward passes: a backward pass costs twice a forward pass.
_STEP_COST = 3.0


def affordable_eval_tokens(config: Config, vocab_size: int, val_tokens: int) -> int | None:
    """Return the number of tokens that an evaluation uses, or None for the whole split.

    An evaluation costs at most a tenth of the training between two evaluations or, if that is more,
    about a second of two cores. Within a budget, it costs a hundredth of the budget at the device's
    assumed speed. It uses `_FEWEST_TOKENS` at least, in whole windows, or one window.
    """
    training, length = config.training, config.spec.block_size
    forward = float(config.spec.costs(vocab_size).forward_flops) + _PER_LOGIT * vocab_size
    speed = _OPERATIONS_PER_SECOND * (_CUDA_FACTOR if training.device == "cuda" else 1)
    affordable = _EVALUATION_SHARE * (training.budget or 0.0) / 10 * speed
    if training.eval_every is not None:
        trained = training.eval_every * config.tokens_per_step * _STEP_COST * forward
        affordable = max(_EVALUATION_SHARE * trained, _CHEAP)
    tokens = max(1, max(_FEWEST_TOKENS, int(affordable / forward)) // length) * length
    return tokens if tokens < min(val_tokens, MOST_TOKENS) else None


def is_whole_affordable(config: Config, val_tokens: int, steps: float, times: int) -> bool:
    """Return True if evaluating the split `times` times costs little compared to `steps`
    training steps."""
    trained = steps * config.tokens_per_step
    return times * min(val_tokens, MOST_TOKENS) <= _EVALUATION_SHARE * _STEP_COST * trained


# --- The clock, and what is due -------------------------------------------------------------------

# A run gets this much time from now on, or its whole budget if that is shorter, even if the start
# of the process has used up the budget.
_LEAST_SECONDS = 2.0
_LEAST_PROGRESS = 1e-9
"""Lower bound of the progress, which avoids division by zero."""
_SHARE_OF_BUDGET = 0.15
"""The largest fraction of a budget for evaluations."""
_CLOSING_FRACTION = 0.05
_CLOSING = 1.0
"""The most seconds of a budget for drawing and ending, and the fraction of a short budget."""


def budget_end(seconds: float, began: float) -> float:
    """Return the `time.perf_counter` at which a call that began at `began` has taken `seconds`."""
    return max(began + seconds, time.perf_counter() + min(seconds, _LEAST_SECONDS))


class Schedule:
    """The time of a run in this process, and when the run evaluates and ends.

    `seconds` and the speed do not include the time of listeners; a budget does.
    """

    def __init__(
        self,
        config: Config,
        state: TrainingState,
        val_tokens: int,
        ends: float | None = None,
        processes: Processes = ALONE,
    ) -> None:
        """A run with a budget ends when `time.perf_counter` reaches `ends`."""
        self._config = config
        self._training = config.training
        self.evaluations = 0
        """the number of evaluations after steps of this process"""
        self._state = state
        self._val_tokens = val_tokens
        self._ends = ends
        self._processes = processes
        self._began = time.perf_counter() - state.seconds
        self._last_read: float | None = None
        self._next_evaluation = _next_tenth(state.progress)
        self._evaluation_seconds = 0.0
        self.restart()

    @property
    def is_over(self) -> bool:
        """Return True after the last step."""
        if self._training.budget is not None:
            return self._state.progress >= 1 and self._state.step > 0
        return self._state.step >= self._training.max_steps

    @property
    def is_out_of_patience(self) -> bool:
        """Return True if `patience` evaluations did not improve the loss."""
        return self._training.patience is not None and self._state.stale >= self._training.patience

    @property
    def should_stop(self) -> bool:
        """Return True if the run makes no more steps."""
        return self.is_over or self.is_out_of_patience

    @property
    def should_evaluate(self) -> bool:
        """Return True if an evaluation is due before the next step or the end."""
        step, every = self._state.step, self._training.eval_every
        if step == self._state.evaluated_step:
            return False
        if every is None:
            return step == 0 or self._state.progress >= self._next_evaluation
        if step == 0:  # not if the only evaluation is the last step's
            return every < self._training.max_steps
        return step % every == 0 or self.is_over

    @property
    def should_snapshot(self) -> bool:
        """Return True if a snapshot without an evaluation is due, in runs that evaluate step 0."""
        every, step = self._training.eval_every, self._state.step
        is_observed = every is None or every < self._training.max_steps
        return is_observed and step in EARLY_STEPS and step != self._state.evaluated_step

    @property
    def steps(self) -> float:
        """Return the number of steps of the whole run, which is estimated within a budget."""
        if self._training.budget is None:
            return self._training.max_steps
        return max(self._state.step, 1) / max(self._state.progress, _LEAST_PROGRESS)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the newest step."""
        return learning_rate(self._state.step, self._training, self.steps)

    def seconds(self) -> float:
        """Return the wall time of the run so far."""
        return time.perf_counter() - self._began

    def restart(self) -> None:
        """Measure the speed from now on."""
        self._since, self._since_step = time.perf_counter(), self._state.step

    def tokens_per_second(self) -> float:
        """Return the speed of the steps since the last `restart`."""
        tokens = (self._state.step - self._since_step) * self._config.tokens_per_step
        return tokens / max(1e-9, time.perf_counter() - self._since)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, stop the watch. A budget goes on."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self._began += spent
        self._since += spent

    def evaluated(self, seconds: float) -> None:
        """Schedule the next evaluation. The newest one took `seconds`.

        Within a budget, evaluate at each tenth of the budget, or less often if that would take too
        much of it. All processes must call this.
        """
        self._evaluation_seconds = seconds
        if self._training.budget is not None:
            pause = seconds / _SHARE_OF_BUDGET / self._training.budget
            following = _next_tenth(self._state.progress + max(0.0, pause - 0.1))
            self._next_evaluation = self._processes.broadcast_object(following)

    def progress_after_step(self) -> float:
        """Return the progress after the step that was just computed, which changes with a budget.

        The remaining progress (1 minus progress) shrinks in proportion to the remaining time. Time
        counts from the first call on, since the first step is slower than others.
        """
        if self._ends is None:
            return self._state.progress
        now = time.perf_counter()
        step_seconds = (now - self._since) / (self._state.step + 1 - self._since_step)
        since, self._last_read = self._last_read or now, now
        left = self._ends - self._closing_seconds(step_seconds) - now
        by_time = 1 - (1 - self._state.progress) * left / (left + now - since) if left > 0 else 1.0
        return max(by_time, (self._state.step + 1) / self._training.max_steps)

    def _closing_seconds(self, step_seconds: float) -> float:
        """Return the seconds of a budget that are needed after the last step.

        After it follow an evaluation, drawing the curve and, if affordable, the loss over the whole
        split, of which a forward pass is a part of a step. It never takes more than a tenth of the
        budget: the first steps do not yet show how many follow. With half a step more, runs end on
        time on average.
        """
        budget = self._training.budget or 0.0
        closing = self._evaluation_seconds + step_seconds / 2
        closing += min(_CLOSING, _CLOSING_FRACTION * budget)
        whole = min(self._val_tokens - 1, MOST_TOKENS)
        tokens = self._training.eval_tokens or whole
        if tokens < whole and is_whole_affordable(self._config, whole, self.steps, 1):
            seconds = step_seconds * whole / (_STEP_COST * self._config.tokens_per_step)
            closing += min(seconds, _EVALUATION_SHARE * budget)
        return closing

    def seconds_left(self) -> float:
        """Estimate the time until the end of the run."""
        if self._ends is not None:
            return max(0.0, self._ends - time.perf_counter())
        tokens = (self._training.max_steps - self._state.step) * self._config.tokens_per_step
        return tokens / self.tokens_per_second()


def _next_tenth(progress: float) -> float:
    """Return the progress at the next evaluation: the next multiple of 0.1, at most 1."""
    return min(1.0, (math.floor(10 * progress + 1e-6) + 1) / 10)
