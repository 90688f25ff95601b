"""Measure how much the exam's scores of the standard model depend on the seed.

    python tools/calibrate_exam.py FOLDER TASK,… SEED…

Each score stands in its line as soon as it is known; the last lines are the range of each task.
A suite is good if the means lie between 40 and 90, and each range has at most 10 points.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import attnlm
from attnlm.base.events import ignore
from attnlm.runs.exam_plan import STANDARD, SUITE
from attnlm.see.exam_card import TaskResult
from attnlm.workflows.exam import prepared, trained


def main() -> None:
    root, tasks, *seeds = sys.argv[1:]
    folder = Path(root)
    torch.set_num_threads(1)
    scores: dict[str, list[float]] = {}
    for seed in map(int, seeds):
        for task in SUITE if tasks == "all" else tasks.split(","):
            dataset = prepared(task, folder)
            model = {**STANDARD.model(task), "threads": 1}
            runs = trained(task, dataset, [seed], None, model, folder, title="", on_event=ignore)
            (score,) = TaskResult(task, dataset, [], runs).scores("standard")
            seconds = runs[0].evaluations()[-1].seconds
            scores.setdefault(task, []).append(score)
            print(f"{task:<18}seed {seed}  {score:5.1f}  {seconds:5.1f} s", flush=True)
    print(f"attnlm {attnlm.__version__}, PyTorch {torch.__version__}, one thread")
    for task, of in scores.items():
        mean, low, high = sum(of) / len(of), min(of), max(of)
        print(f"{task:<18}mean {mean:5.1f}  {low:5.1f} to {high:5.1f}  range {high - low:4.1f}")


if __name__ == "__main__":
    main()
