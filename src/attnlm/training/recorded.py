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
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnlm.base import files
from attnlm.base.errors import AttnlmError
from attnlm.base.own_code import allow_call
from attnlm.compute.device import Device, use_precision
from attnlm.compute.threads import flush_subnormals
from attnlm.config.settings import Config, resolve
from attnlm.model.inspection import (
    are_close,
    build_with_weights,
    draw_zeros,
    restoring,
    stored_buffers,
)
from attnlm.model.language_model import LanguageModel
from attnlm.model.layers import drop_by
from attnlm.model.own_arguments import CODE
from attnlm.model.own_modules import built_buffers
from attnlm.model.own_parts import on_device_of
from attnlm.runs.checkpoint import load_checkpoint, save_checkpoint
from attnlm.runs.run import with_recorded_code
from attnlm.training.forms import batch_loss
from attnlm.training.optimizer import flatten_parameters
from attnlm.training.random_state import keeping_random_state, seed_generators

_TEXTS = 2
_CONFIG, _WEIGHTS, _NUMBERS = "config.json", "opened.safetensors", "numbers.safetensors"
_HINT = (
    "a run keeps one file of own code, parameters and buffers: self.register_buffer('seen', …). "
    "It keeps no attributes, variables of the file, changes of classes and of other modules, "
    "environment, numbers of the process, or order of a set: sort it, as in sorted({'a', 'b'})"
)


class NotAsRecordedError(AttnlmError):
    """Error for own code that computes something else than its run will when opened."""


def check_recorded(config: Config, model: LanguageModel, device: Device) -> None:
    """Raise NotAsRecordedError unless a model with own code computes what its run will when opened.

    A process that did nothing before runs the recorded source, and gets the recorded state. Logits
    and loss of a batch must be the same, in evaluation and in training; then again, in a second
    process, after that batch. The parameters must be flat, as the optimizer makes them. Nothing of
    the model changes.
    """
    if not config.codes:
        return
    with (
        tempfile.TemporaryDirectory() as name,
        keeping_random_state(device, config),
        restoring(model),
    ):
        folder = Path(name)
        with files.explaining_os_errors(folder):
            (folder / CODE).mkdir()
            for code in config.codes:
                (folder / CODE / code.file).write_bytes(code.content())
            files.write_json(folder / _CONFIG, config.settings())
        draw_zeros(model)
        drop_by(model, ())
        parameters = model.named_parameters()
        trained = {name: (p, p.data_ptr()) for name, p in parameters if p.requires_grad}
        for _ in range(2):
            weights = dict(model.named_parameters()) | stored_buffers(model)
            with files.explaining_os_errors(folder):
                save_checkpoint(folder / _WEIGHTS, weights, {})
            _check_forms(stored_buffers(model), built_buffers(config.spec, model.vocab_size))
            ours = list(_numbers(model, config, device))
            _check_kept(trained, model)
            reason, attributes = _open_elsewhere(config, model.vocab_size, device, folder)
            if reason is not None:
                raise NotAsRecordedError(
                    f"{config.spec.name} cannot be opened by another process: {reason}", _HINT
                )
            for i, theirs in load_file(folder / _NUMBERS).items():
                if not _is_same(ours[int(i)].cpu(), theirs, device):
                    here = _attributes(model)
                    others = [name for name in here if here[name] != attributes.get(name)]
                    which = f": {others[0]} differs" if others else ""
                    raise NotAsRecordedError(
                        f"{config.spec.name} computes something else when another process opens "
                        f"its run{which}",
                        _HINT,
                    )


def _is_same(ours: Tensor, theirs: Tensor, device: Device) -> bool:
    if device.name != "cpu":
        return are_close(ours, theirs)
    return torch.allclose(ours.double(), theirs.double(), 0, 0, equal_nan=True)


def _attributes(model: nn.Module) -> dict[str, str]:
    """Return attributes and buffers of own modules, as short texts that are the same elsewhere."""
    return {
        f"{path}.{name}": text
        for path, module in model.named_modules()
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items()
        if "module" in path and name[0] != "_" and " at 0x" not in (text := repr(value)[:999])
    }


def _numbers(model: LanguageModel, config: Config, device: Device) -> Iterator[Tensor]:
    """Yield the logits of a batch twice in evaluation, then logits, loss and logits in training.

    The calls are of an odd number, in training too: what each turns round is another one then.
    """
    loss_of = batch_loss(config.training)
    generator = torch.Generator().manual_seed(0)
    shape = _TEXTS, model.block_size + 1
    ids = torch.randint(model.vocab_size, shape, generator=generator).to(device.torch)
    inputs_BT, targets_BT = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for is_training in (False, True):
        model.train(is_training)
        seed_generators(config.training.seed or 0, config)
        state = torch.get_rng_state()
        with torch.set_grad_enabled(is_training), device.autocast(), on_device_of(inputs_BT):
            yield model(inputs_BT).detach()
            if is_training:
                yield loss_of(model, inputs_BT, targets_BT).detach()
            elif device.name == "cpu" and state.equal(torch.get_rng_state()):
                torch.seed()  # it drew no numbers, and so does not depend on the seed
            yield model(inputs_BT).detach()


def _check_kept(trained: Mapping[str, tuple[nn.Parameter, int]], model: LanguageModel) -> None:
    """Raise NotAsRecordedError unless parameters are those, and in the memory, that are updated."""
    parameters = dict(model.named_parameters())
    for name, (parameter, place) in trained.items():
        if parameters.get(name) is not parameter or parameter.data_ptr() != place:
            raise NotAsRecordedError(
                f"the parameter {name} is replaced while the model computes, and would not train",
                "change it in place, as in: with torch.no_grad(): self.weight.clamp_(-1, 1)",
            )


def _check_forms(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Raise NotAsRecordedError if buffers are not of the form that the constructor gives them."""
    forms, built = (
        {n: f"{tuple(b.shape)} of {b.dtype}" for n, b in buffers.items()}
        for buffers in (ours, theirs)
    )
    for name in sorted(forms.keys() | built.keys()):
        now, then = forms.get(name, "None"), built.get(name, "None")
        if now != then:
            raise NotAsRecordedError(
                f"the buffer {name} is {now}, but {then} when the model is built",
                "give it its shape and type in the constructor, or register it with "
                "persistent=False if each batch makes it again",
            )


# --- The other process ----------------------------------------------------------------------------

_ENVIRONMENT = re.compile(
    "(HOME|LANG|LD_LIBRARY_PATH|PATH|PYTHONPATH|SYSTEMROOT|TE?MP|TMPDIR|USERPROFILE|VIRTUAL_ENV)"
    "|(ATEN|ATTNLM|CONDA|CUDA|DNNL|DYLD|GOMP|KMP|LC|MKL|NVIDIA|OMP|ONEDNN|OPENBLAS)_.*"
    "|(PYTORCH|TORCH|TRITON|XDG)_.*"
)
"""the variables that Python and the libraries need: own code that reads another one is found"""
_OPENERS: dict[tuple[int, str], subprocess.Popen[str]] = {}
"""processes that wait for requests, by the process that started them and their seed of hashes"""
_SEEDS = [s for s in map(str, range(1, 33)) if s != os.environ.get("PYTHONHASHSEED")]


def _open_elsewhere(
    config: Config, vocab_size: int, device: Device, folder: Path
) -> tuple[str | None, dict[str, str]]:
    """Let another process write the numbers of the run in a folder.

    Return why it could not, or None, and the attributes of the model that it opened.
    """
    key = os.getpid(), _seed_of_other_orders(tuple(code.content() for code in config.codes))
    opener = _OPENERS.pop(key, None) or _start_opener(key[1])
    assert opener.stdin and opener.stdout
    request = str(folder), vocab_size, (device.name, device.dtype, ""), torch.get_num_threads()
    answer = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=opener.stdin, flush=True)
            answer = opener.stdout.readline()
    finally:
        if answer.endswith("\n"):
            _OPENERS[key] = opener
        else:
            opener.kill()
            opener.communicate()
    reason, attributes = json.loads(answer.strip() or '["it ended at once", {}]')
    return reason, attributes


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


@atexit.register
def _end_openers() -> None:
    for (pid, _), opener in _OPENERS.items():
        if pid == os.getpid():
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


def _answer(
    path: str, vocab_size: int, about_device: tuple[str, str, str], threads: int
) -> tuple[str | None, dict[str, str]]:
    """Open the run in a folder, and write its numbers there; return as `_open_elsewhere`."""
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
        numbers = {str(i): x.cpu() for i, x in enumerate(_numbers(opened, recorded, device))}
        save_file(numbers, folder / _NUMBERS)
        return None, _attributes(opened)
    except AttnlmError as error:
        return error.message, {}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        return f"{type(error).__name__}: {error}", {}


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
        for literal in made:
            with contextlib.suppress(ValueError, TypeError):
                texts = [x for x in ast.literal_eval(literal) if isinstance(x, str)]
                groups += [texts] if len(texts) > 1 else []

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
