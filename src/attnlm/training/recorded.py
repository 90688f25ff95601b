"""Is what a run records what it trains? Another process opens the run, and computes with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.own_code import OwnCodeError, allow_call
from attnlm.compute.device import Device, use_precision
from attnlm.compute.threads import flush_subnormals
from attnlm.config.settings import Config, resolve
from attnlm.model.building import build_with_weights, stored_buffers
from attnlm.model.inspection import are_close, draw_zeros, restoring
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_arguments import CODE
from attnlm.model.own_parts import on_device_of
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.runs.run import with_recorded_code
from attnlm.training.forms import batch_loss
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.random_state import keeping_random_state, seed_generators

_TEXTS = 2
_CONFIG, _WEIGHTS = "config.json", "opened.safetensors"
_HINT = (
    "a run keeps one file of own code, parameters and buffers, of the shape and type that the "
    "constructor gives them: self.register_buffer('seen', …). "
    "It keeps no attributes, variables of the file, changes of classes and of other modules, "
    "environment, numbers of the process, or order of a set: sort it, as in sorted({'a', 'b'}). "
    "Of a class that is passed, it keeps assignments to names, also from lines after the training, "
    "and no calls such as TABLE.update(): write such a class to a file of its own"
)


def check_recorded(config: Config, model: LanguageModel, device: Device) -> None:
    """Raise OwnCodeError unless a model with own code computes what its run will when opened.

    A process that did nothing before runs the recorded source, and gets the state after a batch.
    The losses of the next one must be the same, in evaluation and in training. The parameters must
    be flat, as the optimizer makes them. Nothing of the model changes.
    """
    if not config.codes:
        return
    name = config.spec.name
    with tempfile.TemporaryDirectory() as path, keeping_random_state(device), restoring(model):
        folder = Path(path)
        draw_zeros(model)
        drop_by(model, ())
        trained = [(n, p, p.data_ptr()) for n, p in model.named_parameters() if p.requires_grad]
        _losses(model, config, device)  # what a batch changes, a run must keep
        with files.explaining_os_errors(folder):
            (folder / CODE).mkdir()
            for code in config.codes:
                (folder / CODE / code.file).write_bytes(code.content())
            files.write_json(folder / _CONFIG, config.settings())
            weights = dict(model.named_parameters()) | stored_buffers(model)
            save_checkpoint(folder / _WEIGHTS, weights, {})
        ours = _losses(model, config, device)
        _check_kept(trained, model)
        about_device = device.name, device.dtype
        opened = _open_elsewhere(path, model.vocab_size, about_device, torch.get_num_threads())
        if "error" in opened:
            raise OwnCodeError(
                f"{name} cannot be opened by another process: {opened['error']}", _HINT
            )
        theirs, attributes = opened["losses"], _attributes(model)
        is_near = device.name != "cpu" and are_close(torch.tensor(theirs), torch.tensor(ours))
        if str(theirs) != str(ours) and not is_near:  # as texts, NaN equals NaN; a GPU rounds
            others = [n for n, text in opened["attributes"].items() if attributes.get(n) != text]
            which = f": {others[0]} differs" if others else ""
            raise OwnCodeError(
                f"{name} computes something else when another process opens its run{which}", _HINT
            )


def _losses(model: LanguageModel, config: Config, device: Device) -> list[float]:
    """Return the loss of a batch in evaluation, and the loss that is trained.

    The model is called once in each mode: a second call would hide what each call inverts.
    """
    generator = torch.Generator().manual_seed(0)
    shape = _TEXTS, model.block_size + 1
    ids = torch.randint(model.vocab_size, shape, generator=generator).to(device.torch)
    inputs_BT, targets_BT = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    losses = []
    for is_training in (False, True):
        loss_of = batch_loss(config.training) if is_training else type(model).loss
        model.train(is_training)
        seed_generators(config.training.seed or 0)
        with torch.set_grad_enabled(is_training), device.autocast(), on_device_of(inputs_BT):
            losses.append(loss_of(model, inputs_BT, targets_BT).item())
    return losses


def _attributes(model: nn.Module) -> dict[str, str]:
    """Return attributes and buffers of own modules, as short texts that are the same elsewhere."""
    return {
        f"{path}.{name}": text
        for path, module in model.named_modules()
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if "module" in path and name[0] != "_" and " at 0x" not in (text := repr(value)[:999])
    }


def _check_kept(trained: list[tuple[str, nn.Parameter, int]], model: LanguageModel) -> None:
    """Raise OwnCodeError unless parameters are those, and in the memory, that are updated."""
    parameters = dict(model.named_parameters())
    for name, parameter, place in trained:
        if parameters.get(name) is not parameter or parameter.data_ptr() != place:
            raise OwnCodeError(
                f"the parameter {name} is replaced while the model computes, and would not train",
                "change it in place, as in: with torch.no_grad(): self.weight.clamp_(-1, 1)",
            )


# --- The other process ----------------------------------------------------------------------------

_ENVIRONMENT = re.compile(
    "(HOME|LANG|LD_LIBRARY_PATH|PATH|PYTHONPATH|SYSTEMROOT|TE?MP|TMPDIR|USERPROFILE|VIRTUAL_ENV)"
    "|(ATEN|ATTNLM|CONDA|CUDA|DNNL|DYLD|GOMP|KMP|LC|MKL|NVIDIA|OMP|ONEDNN|OPENBLAS)_.*"
    "|(PYTORCH|TORCH|TRITON|XDG)_.*"
)
"""the variables that Python and the libraries need: own code that reads another one is found"""
_OPENERS: dict[int, subprocess.Popen[str]] = {}
"""the process that waits for requests, by the process that started it"""


def _open_elsewhere(*request: Any) -> dict[str, Any]:
    """Let another process open the run in a folder, and return its answer to a request."""
    opener = _OPENERS.pop(os.getpid(), None)
    if opener is None or opener.poll() is not None:
        opener = _start_opener()
    assert opener.stdin and opener.stdout
    answer = ""
    try:
        with contextlib.suppress(OSError):
            print(json.dumps(request), file=opener.stdin, flush=True)
            answer = opener.stdout.readline()
    finally:
        if answer.endswith("\n"):
            _OPENERS[os.getpid()] = opener
        else:
            _end(opener)
    try:
        return json.loads(answer)  # type: ignore[no-any-return]
    except ValueError:
        return {"error": "it ended at once"}


def _start_opener() -> subprocess.Popen[str]:
    kept = {name: v for name, v in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # sets have another order
    home = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.append({home!r}); from {__name__} import open_runs as f; f()"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**kept, "PYTHONHASHSEED": seed, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,
    )


def _end(opener: subprocess.Popen[str]) -> None:
    """End a process and, where the system can, those that it has started."""
    if sys.platform == "win32":
        opener.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(opener.pid, signal.SIGKILL)
    opener.communicate()


@atexit.register
def _end_opener() -> None:
    if opener := _OPENERS.pop(os.getpid(), None):
        _end(opener)


def open_runs() -> None:
    """Answer each line of stdin by a line on stdout, until stdin ends.

    Each answer is of a process that did nothing before: a fork of this one or, where a fork cannot
    compute, this one, which ends then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # own code may read and print
    os.dup2(nowhere, 1)
    for request in requests:
        if sys.platform == "linux" and (fork := os.fork()):
            os.waitpid(fork, 0)
            os.write(answers, b"\n")
            continue
        ending = threading.Thread(target=lambda: (requests.read(), os._exit(1)), daemon=True)
        ending.start()  # with the process that asked
        os.write(answers, json.dumps(_answer(*json.loads(request))).encode())
        break
    os._exit(0)


def _answer(
    path: str, vocab_size: int, about_device: tuple[str, str], threads: int
) -> dict[str, Any]:
    """Open the run in a folder; return its losses and attributes, or the error that it raises."""
    device, folder = Device(*about_device), Path(path)
    torch.set_num_threads(threads)
    flush_subnormals()
    use_precision(device)
    try:
        settings = with_recorded_code(files.read_json(folder / _CONFIG), folder / CODE)
        recorded = resolve({}, settings)
        for code in recorded.codes:
            allow_call(code.content(), code.name)
        weights = load_checkpoint(folder / _WEIGHTS, recorded.spec, vocab_size)[1]
        opened = build_with_weights(recorded.spec, vocab_size, weights).to(device.torch)
        flatten_parameters(opened, recorded.training)
        return {"losses": _losses(opened, recorded, device), "attributes": _attributes(opened)}
    except AttnlmError as error:
        reason = error.message.replace(str(folder / _WEIGHTS), "its checkpoint")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        reason = f"{type(error).__name__}: {error}"
    return {"error": reason}
