"""Training by several processes: what the main process broadcasts, and what the others do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import ignore
from attnlm.compute.choices import keeping_threads
from attnlm.compute.device import choose_device, use_precision
from attnlm.compute.processes import Processes
from attnlm.config.settings import resolve
from attnlm.config.training import TrainingConfig
from attnlm.runs.open_run import open_dataset_of, open_run
from attnlm.runs.run import Run
from attnlm.training.loop import fit
from attnlm.training.state import begun_state

_FACTS = ("vocab_size", "parameters", "dataset", "parent")
_RUN = "run"


def check_launched(training: TrainingConfig, processes: Processes) -> None:
    """Raise UsageError if the configuration's `processes` is not the number of started ones."""
    if training.processes != processes.count:
        raise UsageError(
            f"`processes` is {training.processes}, but {processes.count} started",
            f"start as many with torchrun, or give `processes` {processes.count}",
        )


def check_alike(processes: Processes, *options: object) -> None:
    """Raise UsageError in all processes if one has options other than the main process."""
    if processes.count == 1:
        return
    text = json.dumps(options, sort_keys=True, default=str)
    ours = hashlib.sha256(text.encode()).hexdigest()
    differing = torch.tensor(float(processes.from_main(ours) != ours))
    processes.add_up(differing, "options")
    if differing:
        raise UsageError(
            f"{int(differing)} of {processes.count} processes have other options than the first",
            "start all with the same options, and on each machine the same version and recipe",
        )


def tell(run: Run, fresh: bool, processes: Processes) -> None:
    """Let the other processes join the training of a run, new or resumed."""
    if processes.count == 1:
        return
    processes.remember(_RUN, str(run.path.absolute()))
    facts = {name: getattr(run, name) for name in _FACTS}
    about = {"path": str(run.path), "settings": run.config.settings(), "fresh": fresh}
    processes.from_main({**about, **facts})


def begun_before(processes: Processes) -> Path | None:
    """Return the run that these processes trained before the launcher restarted them, or None."""
    path = processes.recalled(_RUN)
    return Path(path) if path is not None and Path(path).exists() else None


def join(processes: Processes, data_dir: Path, verify: bool) -> Run:
    """Do this process's part of the training that the main process has begun.

    Emit no events and write no files. Raises AttnlmError as `fit` does, and if the data set is
    missing or another one.
    """
    told = processes.from_main(None)
    if "refused" in told:
        raise AttnlmError(*told["refused"])
    if "finished" in told:
        return open_run(told["finished"])
    config = resolve({}, told["settings"])
    run = Run(Path(told["path"]), config, **{name: told[name] for name in _FACTS})
    try:
        dataset = open_dataset_of(run, data_dir, verify=verify)
    except AttnlmError as error:
        hint = "each machine needs the same data set: copy it from the first one"
        raise AttnlmError(error.message, hint) from None
    device = choose_device(config.training.device, config.training.dtype)
    with keeping_threads():
        use_precision(device)
        state = begun_state(run, device, told["fresh"], processes)
        return fit(run, dataset, state, ignore, processes=processes)
