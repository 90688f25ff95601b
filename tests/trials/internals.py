"""All that the trials use of attnlm beside what `import attnlm` offers."""

from attnlm import checkpoint, console, decoding, download, exits, files, folders
from attnlm.cli import run_command
from attnlm.config import RUNGS, flag, load_recipe, resolve, setting_names
from attnlm.dataset import sampled_hash
from attnlm.device import choose_device
from attnlm.events import Progress
from attnlm.journal import Journal
from attnlm.launch import _has_compiler as has_compiler
from attnlm.memory import FACTOR
from attnlm.model import build_model, count_parameters, model_skeleton
from attnlm.native import library
from attnlm.one_layer import compiled_parts, has_parts
from attnlm.optimizer import Optimizer
from attnlm.run import Run
from attnlm.training import Evaluated, Started, Stepped, Stepper, saved_state

__all__ = [
    "FACTOR",
    "RUNGS",
    "Evaluated",
    "Journal",
    "Optimizer",
    "Progress",
    "Run",
    "Started",
    "Stepped",
    "Stepper",
    "build_model",
    "checkpoint",
    "choose_device",
    "compiled_parts",
    "console",
    "count_parameters",
    "decoding",
    "download",
    "exits",
    "files",
    "flag",
    "folders",
    "has_compiler",
    "has_parts",
    "library",
    "load_recipe",
    "model_skeleton",
    "resolve",
    "run_command",
    "sampled_hash",
    "saved_state",
    "setting_names",
]
