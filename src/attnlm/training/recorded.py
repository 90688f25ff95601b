"""Is what a run records what it trains? Another process opens the run, and computes with it."""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

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
_CONFIG, _WEIGHTS, _NUMBERS = "config.json", "opened.safetensors", "numbers.safetensors"
_LEAST_SECONDS = 120.0
"""in which another process must answer, beside twenty times what this one needed"""
_HINT = (
    "a run keeps one file of own code, parameters and buffers, of the shape and type that the "
    "constructor gives them: self.register_buffer('seen', …). "
    "It keeps no attributes, variables of the file, changes of classes and of other modules, "
    "environment, numbers of the process, or order of a set: sort it, as in sorted({'a', 'b'})"
)


def check_recorded(config: Config, model: LanguageModel, device: Device) -> None:
    """Raise OwnCodeError unless a model with own code computes what its run will when opened.

    A process that did nothing before runs the recorded source, and gets the state after a batch.
    Logits and loss of the next one must be the same, in evaluation and in training. The parameters
    must be flat, as the optimizer makes them. Nothing of the model changes.
    """
    if not config.codes:
        return
    with (
        tempfile.TemporaryDirectory() as name,
        keeping_random_state(device),
        restoring(model),
    ):
        folder = Path(name)
        draw_zeros(model)
        drop_by(model, ())
        parameters = model.named_parameters()
        trained = {name: (p, p.data_ptr()) for name, p in parameters if p.requires_grad}
        _numbers(model, config, device)  # what a batch changes, a run must keep
        with files.explaining_os_errors(folder):
            (folder / CODE).mkdir()
            for code in config.codes:
                (folder / CODE / code.file).write_bytes(code.content())
            files.write_json(folder / _CONFIG, config.settings())
            weights = dict(model.named_parameters()) | stored_buffers(model)
            save_checkpoint(folder / _WEIGHTS, weights, {})
        began = time.perf_counter()
        numbers = _numbers(model, config, device)
        seconds = _LEAST_SECONDS + 20 * (time.perf_counter() - began)
        _check_kept(trained, model)
        with files.explaining_os_errors(folder):
            save_file(numbers, folder / _NUMBERS, _attributes(model))
        if reason := _open_elsewhere(config, model.vocab_size, device, folder, seconds):
            raise OwnCodeError(f"{config.spec.name} {reason}", _HINT)


def _attributes(model: nn.Module) -> dict[str, str]:
    """Return attributes and buffers of own modules, as short texts that are the same elsewhere."""
    return {
        f"{path}.{name}": text
        for path, module in model.named_modules()
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if "module" in path and name[0] != "_" and " at 0x" not in (text := repr(value)[:999])
    }


def _numbers(model: LanguageModel, config: Config, device: Device) -> dict[str, Tensor]:
    """Return logits of a batch and its beginnings, and in training its loss and gradients.

    The calls are of an odd number, in training too: what each turns round is another one then.
    """
    loss_of = batch_loss(config.training)
    generator = torch.Generator().manual_seed(0)
    shape = _TEXTS, model.block_size + 1
    ids = torch.randint(model.vocab_size, shape, generator=generator).to(device.torch)
    inputs_BT, targets_BT = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    numbers = []
    for is_training in (False, True):
        model.train(is_training)
        seed_generators(config.training.seed or 0)
        state = torch.get_rng_state()
        with torch.set_grad_enabled(is_training), device.autocast(), on_device_of(inputs_BT):
            numbers.append(model(inputs_BT).detach())
            if is_training:
                loss = loss_of(model, inputs_BT, targets_BT)
                numbers += [loss.detach(), *_sums(loss, model)]
            elif device.name == "cpu" and state.equal(torch.get_rng_state()):
                torch.seed()  # it drew no numbers, and so does not depend on the seed
            numbers.append(model(inputs_BT).detach())
            if not is_training:
                numbers += [_logits_of_short(model, inputs_BT[:, :T]) for T in (1, 2)]
    return {str(i): x.cpu().contiguous().clone() for i, x in enumerate(numbers)}


def _sums(loss: Tensor, model: LanguageModel) -> list[Tensor]:
    """Return sum and norm of each parameter's gradient; [] if it fails, as training then says."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not (loss.requires_grad and parameters):
        return []
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception:  # noqa: BLE001 - own code may raise anything
        return []
    known = [gradient.double() for gradient in gradients if gradient is not None]
    return [torch.stack([gradient.sum(), gradient.norm()]) for gradient in known]


def _logits_of_short(model: LanguageModel, inputs_BT: Tensor) -> Tensor:
    """Return logits, or one 0 if own code fails on short texts: then sampling says so."""
    try:
        logits: Tensor = model(inputs_BT.contiguous())
    except Exception:  # noqa: BLE001 - own code may raise anything
        return torch.zeros(())
    return logits.detach()


def _check_kept(trained: Mapping[str, tuple[nn.Parameter, int]], model: LanguageModel) -> None:
    """Raise OwnCodeError unless parameters are those, and in the memory, that are updated."""
    parameters = dict(model.named_parameters())
    for name, (parameter, place) in trained.items():
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
_NOT_OPENED = "cannot be opened by another process"
_OPENERS: dict[tuple[int, str], subprocess.Popen[str]] = {}
"""processes that wait for requests, by the process that started them and their seed of hashes"""
_SEEDS = [s for s in map(str, range(1, 33)) if s != os.environ.get("PYTHONHASHSEED")]


def _open_elsewhere(
    config: Config, vocab_size: int, device: Device, folder: Path, seconds: float
) -> str:
    """Let another process open the run in a folder; return what is wrong, "" if nothing is."""
    key = os.getpid(), _seed_of_other_orders(tuple(code.content() for code in config.codes))
    opener = _OPENERS.pop(key, None) or _start_opener(key[1])
    assert opener.stdin and opener.stdout
    request = str(folder), vocab_size, (device.name, device.dtype), torch.get_num_threads()
    began, answer = time.perf_counter(), ""
    limit = threading.Timer(seconds, _end, [opener])
    limit.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=opener.stdin, flush=True)
            answer = opener.stdout.readline()
    finally:
        limit.cancel()
        limit.join()  # it may have ended the process after the answer
        if answer.endswith("\n") and opener.poll() is None:
            _OPENERS[key] = opener
        else:
            _end(opener)
            opener.communicate()
    if answer.strip():
        return str(json.loads(answer))
    is_late = time.perf_counter() - began >= seconds
    what = f"took more than {seconds:.0f} seconds" if is_late else "ended at once"
    return f"{_NOT_OPENED}: it {what}"


def _start_opener(seed: str) -> subprocess.Popen[str]:
    kept = {name: v for name, v in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
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
    """End a process, and the one that answers for it."""
    if sys.platform == "win32":
        opener.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(opener.pid, signal.SIGKILL)
    opener.wait()


@atexit.register
def _end_openers() -> None:
    for (pid, _), opener in _OPENERS.items():
        if pid == os.getpid():
            _end(opener)
            opener.communicate()


def open_runs() -> None:
    """Answer each line of stdin by a line on stdout, until stdin ends.

    Each answer is of a process that did nothing before: a fork of this one or, where a fork cannot
    compute, this one, which ends then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # own code may read and print
        os.dup2(nowhere, standard)
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


def _answer(path: str, vocab_size: int, about_device: tuple[str, str], threads: int) -> str:
    """Open the run in a folder; return how its numbers are others than those there, or ""."""
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
        numbers = _numbers(opened, recorded, device)
        with safe_open(folder / _NUMBERS, "pt") as ours:
            known = {i: ours.get_tensor(i) for i in ours.keys()}  # noqa: SIM118 - not a dictionary
            theirs = ours.metadata() or {}
        if known.keys() == numbers.keys() and all(
            _is_same(numbers[i], x, device) for i, x in known.items()
        ):
            return ""
        others = [name for name, text in _attributes(opened).items() if theirs.get(name) != text]
        which = f": {others[0]} differs" if others else ""
        return f"computes something else when another process opens its run{which}"
    except AttnlmError as error:
        reason = error.message.replace(str(folder / _WEIGHTS), "its checkpoint")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        reason = f"{type(error).__name__}: {error}"
    return f"{_NOT_OPENED}: {reason}"


def _is_same(actual: Tensor, expected: Tensor, device: Device) -> bool:
    """Return True if numbers are equal, or on a GPU, which rounds, close."""
    if actual.shape != expected.shape:
        return False
    if device.name != "cpu":
        return are_close(actual, expected)
    return torch.allclose(actual.double(), expected.double(), 0, 0, equal_nan=True)


@functools.cache
def _seed_of_other_orders(sources: tuple[bytes, ...]) -> str:
    """Return a seed of hashes with which texts have other places in the sources' sets than here.

    With a seed that is not chosen, two texts have the same order half of the time.
    """
    groups = []
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("set", "frozenset"):
            made = node.args
        else:
            made = [node] if isinstance(node, ast.Set) else []
        groups += [texts for texts in map(_texts, made) if len(texts) > 1]

    def moved(seed: str) -> float:
        theirs = subprocess.check_output(
            [sys.executable, "-"],
            input=f"print(ascii([[*{{*x}}] for x in {groups!a}]))",
            env={**os.environ, "PYTHONHASHSEED": seed},
            encoding="utf-8",
        )
        pairs = zip(([*{*group}] for group in groups), ast.literal_eval(theirs), strict=True)
        return sum(sum(map(str.__ne__, *pair)) / len(pair[0]) for pair in pairs)

    return max(_SEEDS if groups else _SEEDS[:1], key=moved)


def _texts(literal: ast.expr) -> list[str]:
    """Return the texts of which a set is made, in their order: that of the set depends on it."""
    parts = getattr(literal, "elts", [literal])
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    texts = [value for value in values if isinstance(value, str)]
    return [*texts[0]] if parts == [literal] and texts else texts
