"""A job: a run that the processes of a call have opened to train it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlm.base import clock
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent, ignore
from attnlm.base.own_code import allow_call, check_not_running
from attnlm.compute.device import Device, choose_device, use_precision
from attnlm.compute.processes import Processes, join_processes
from attnlm.compute.threads import torch_settings_restored
from attnlm.config.training import TrainingConfig
from attnlm.data.dataset import Dataset
from attnlm.runs.run import Run, open_dataset_of, run_from_content
from attnlm.see.curves import CurveDrawer
from attnlm.see.loggers import LogListener, check_tools
from attnlm.training.budget_clock import BudgetClock
from attnlm.training.eval_budget import affordable_sample_tokens
from attnlm.training.state import TrainingState, load_or_init_state


@dataclass(frozen=True)
class TrainCall:
    """What every job of a call of `train` needs: arguments, and what the call has set up."""

    checkpoint_dir: Path
    data_dir: Path
    verify: bool
    began: float
    """the `time.perf_counter` at which a budget begins"""
    processes: Processes
    on_event: OnEvent
    """the listener of rank 0, which also draws the curve and logs; the others' does nothing"""


@dataclass(frozen=True)
class Job:
    """A run that this process has opened to train it, and what the training starts with."""

    run: Run
    dataset: Dataset
    state: TrainingState
    clock: BudgetClock | None
    """the clock of the run's budget, if it has one"""
    sample_tokens: int
    """the length of the text that each snapshot samples"""


@contextlib.contextmanager
def open_call(
    checkpoint_dir: str | Path,
    data_dir: str | Path,
    verify: bool,
    log: str | Sequence[str] | None,
    on_event: OnEvent | None,
) -> Iterator[TrainCall]:
    """Join the other processes, and set up the listener. The arguments are as in `train`."""
    check_not_running()
    began = clock.budget_start()
    tools = [log] if isinstance(log, str) else log or ()
    check_tools(tools)
    with join_processes() as processes, contextlib.ExitStack() as stack:
        listener: OnEvent = ignore
        if processes.is_main:
            logs = LogListener(CurveDrawer(on_event or ignore), tools)
            listener = stack.enter_context(contextlib.closing(logs))
        stack.enter_context(torch_settings_restored())
        yield TrainCall(Path(checkpoint_dir), Path(data_dir), verify, began, processes, listener)


def start_job(
    call: TrainCall, run: Run, dataset: Dataset, device: Device, *, is_fresh: bool
) -> Job:
    """Return the job with the state to train from. All processes must call this.

    `is_fresh` is True if there is no checkpoint yet.
    """
    use_precision(device)
    state = load_or_init_state(run, device, is_fresh, call.processes)
    budget = run.config.training.budget
    left = None if budget is None else BudgetClock.of((1 - state.progress) * budget, call.began)
    sample_tokens = affordable_sample_tokens(run.config, run.vocab_size)
    return Job(run, dataset, state, left, sample_tokens)


def announce(
    processes: Processes, run: Run, *, is_fresh: bool = False, is_finished: bool = False
) -> None:
    """Tell the other processes what they need to know of a run."""
    for own in run.config.codes:  # the other processes run what they receive
        own.check_call(run.config.arguments_of(own))
    code = [(own.name, own.content().decode()) for own in run.config.codes]
    processes.broadcast_object((str(run.path), run.content(), code, is_fresh, is_finished))


@contextlib.contextmanager
def joined_job(call: TrainCall) -> Iterator[Job | Run]:
    """Wait for the run that rank 0 announces, and yield this process's job, or a finished run.

    Raises AttnlmError if the data set is missing or differs.
    """
    path, config, code, is_fresh, is_finished = call.processes.broadcast_object(None)
    for name, content in code:
        allow_call(content.encode(), name)
    run = run_from_content(Path(path), config)
    if is_finished:
        yield run
        return
    try:
        dataset = open_dataset_of(run, call.data_dir, verify=call.verify)
    except AttnlmError as error:
        hint = "each machine needs the same data set: copy it from the first one"
        raise AttnlmError(error.message, hint) from None
    device = choose_device(run.config.training.device, run.config.training.dtype)
    yield start_job(call, run, dataset, device, is_fresh=is_fresh)


def check_launched(training: TrainingConfig, processes: Processes) -> None:
    """Raise UsageError if the setting `processes` differs from the number of started processes."""
    if training.processes != processes.count:
        raise UsageError(
            f"`processes` is {training.processes}, but {processes.count} were started",
            f"start {training.processes} with torchrun, or use `processes` {processes.count}",
        )
