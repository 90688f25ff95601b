"""All that the trials use of attnlm beside what `import attnlm` offers."""

from attnlm.base import files
from attnlm.base.events import Progress
from attnlm.base.folders import flag
from attnlm.cli import console, exits
from attnlm.cli.app import run_command
from attnlm.compute.device import choose_device
from attnlm.compute.native import library
from attnlm.config.recipes import load_recipe
from attnlm.config.settings import resolve, setting_names
from attnlm.data.dataset import sampled_hash
from attnlm.experiments.settle import _has_compiler as has_compiler
from attnlm.model.architecture import RUNGS
from attnlm.model.inspection import count_parameters, model_skeleton
from attnlm.model.language_model import build_model
from attnlm.runs import checkpoint
from attnlm.runs.json_lines import Journal
from attnlm.runs.run import Run
from attnlm.text import download
from attnlm.training.events import Evaluated, Started, Stepped
from attnlm.training.kernels import has_parts, parts_compile
from attnlm.training.memory import FACTOR
from attnlm.training.optimizer import FlatOptimizer
from attnlm.training.state import saved_state
from attnlm.training.step import Stepper

__all__ = [
    "FACTOR",
    "RUNGS",
    "Evaluated",
    "FlatOptimizer",
    "Journal",
    "Progress",
    "Run",
    "Started",
    "Stepped",
    "Stepper",
    "build_model",
    "checkpoint",
    "choose_device",
    "console",
    "count_parameters",
    "download",
    "exits",
    "files",
    "flag",
    "has_compiler",
    "has_parts",
    "library",
    "load_recipe",
    "model_skeleton",
    "parts_compile",
    "resolve",
    "run_command",
    "sampled_hash",
    "saved_state",
    "setting_names",
]
