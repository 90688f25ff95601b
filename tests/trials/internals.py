"""All that the trials use of attnlm beside what `import attnlm` offers."""

import attnlm
from attnlm.base import files as files
from attnlm.base.events import Progress as Progress
from attnlm.base.folders import flag as flag
from attnlm.cli import console as console
from attnlm.cli import exits as exits
from attnlm.compute.device import choose_device as choose_device
from attnlm.compute.native import library as library
from attnlm.config.recipes import load_recipe as load_recipe
from attnlm.config.settings import RECORD_OF as RECORD_OF
from attnlm.config.settings import Config as Config
from attnlm.config.settings import resolve as resolve
from attnlm.data.dataset import sampled_hash as sampled_hash
from attnlm.experiments import settle
from attnlm.model.architecture import RUNGS as RUNGS
from attnlm.model.inspection import parameter_shapes as parameter_shapes
from attnlm.model.language_model import build_model as build_model
from attnlm.runs import checkpoint as checkpoint
from attnlm.runs.run import Run as Run
from attnlm.text import download as download
from attnlm.training.events import Evaluated as Evaluated
from attnlm.training.events import Started as Started
from attnlm.training.events import Stepped as Stepped
from attnlm.training.kernels import has_parts as has_parts
from attnlm.training.kernels import parts_compile as parts_compile
from attnlm.training.memory import FACTOR as FACTOR
from attnlm.training.optimizer import FlatOptimizer as FlatOptimizer
from attnlm.training.state import begun_state as begun_state
from attnlm.training.step import Stepper as Stepper

has_compiler = settle._has_compiler

# Trials fork after this, so that none of their children has to import it.
loaded = [getattr(attnlm, name) for name in attnlm.__all__]
