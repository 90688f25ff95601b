"""Who writes a training's checkpoints, and when: the main process at once, or all beside it."""

from __future__ import annotations

from attnlm.compute.processes import Processes
from attnlm.runs.checkpoint import save_checkpoint
from attnlm.runs.hugging_face.adapter import write_adapter
from attnlm.runs.run import Run
from attnlm.runs.sharded_checkpoint import ShardedCheckpoints
from attnlm.training.state import TrainingState


class Saver:
    """The main process writes whole files; training waits."""

    def __init__(self, run: Run, state: TrainingState, processes: Processes) -> None:
        self._run, self._state = run, state
        self.is_writer = processes.is_main
        """Whether this process has to call it."""

    def save(self, best_loss: float | None = None) -> None:
        """Writes the last checkpoint; before it the best one, where this is it.

        Raises OSError.
        """
        run, state = self._run, self._state
        weights = state.optimizer.weights()  # all, whatever the model computes with just now
        if best_loss is not None:
            save_checkpoint(run.best, weights, self._about_best(best_loss))
            write_adapter(run, weights)
        save_checkpoint(run.last, weights, state.facts(), state.optimizer.state())
        state.saved_step = state.step

    def finish(self) -> None:
        """Waits until all is written. Raises as `save` does."""

    def _about_best(self, loss: float) -> dict[str, float]:
        return {"step": self._state.step, "val_loss": loss}


class ShardedSaver(Saver):
    """Each process writes its rows of every tensor, while training goes on."""

    def __init__(self, run: Run, state: TrainingState, processes: Processes) -> None:
        super().__init__(run, state, processes)
        self.is_writer = True
        self._processes, self._checkpoints = processes, ShardedCheckpoints(processes)

    def save(self, best_loss: float | None = None) -> None:
        run, state, step = self._run, self._state, self._state.step

        def saved() -> None:
            state.saved_step = step

        weights, remembered = state.copies(self._processes)
        if best_loss is not None:
            self._checkpoints.save(run.best, weights, self._about_best(best_loss))
        self._checkpoints.save(run.last, weights | remembered, state.facts(), saved, after=run.best)

    def finish(self) -> None:
        self._checkpoints.finish()
