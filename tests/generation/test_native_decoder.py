"""The decoder in C gives the logits of the textbook pass, for every architecture."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlm.base.events import Note
from attnlm.base.setting_fields import Setting, Settings
from attnlm.compute import native
from attnlm.compute.device import Device
from attnlm.compute.native import instruction_sets, load, native_library
from attnlm.generation import native_decoder
from attnlm.generation.module_decoder import ModuleDecoder, decoders_of
from attnlm.generation.native_decoder import NativeDecoder, NativeModel
from attnlm.generation.next_token import Ids
from attnlm.generation.sampling import sampler_of
from attnlm.generation.sampling_config import SamplingConfig
from attnlm.model.language_model import Transformer
from attnlm.tokens.tokenizer import CharTokenizer
from tests.models import CHANGES, V, by_the_book, small_model, some_ids, variants_where
from tests.tolerances import assert_near
from tools.compile_kernels import compile_native

CPU = Device("cpu", "float32", "tests")
BLOCK = 13

SETS = instruction_sets()
KERNELS = [f"kernels-{name}{native._SUFFIX}" for name in SETS]


def library(name: str = "") -> CDLL:
    """The kernels for an instruction set; by default, those that are used."""
    found = load(name) if name else native_library()
    if found is None:
        pytest.skip("there are no kernels here")
    return found


def a_model(name: str, vocab_size: int = V, **more: Setting) -> Transformer:
    model = small_model(name, vocab_size, **more).float()
    assert isinstance(model, Transformer)
    return model


def native_model(model: Transformer, found: CDLL) -> NativeModel:
    """The model in the layout of the C file."""
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return NativeModel(model.architecture, model.vocab_size, weights, found)


EMBEDDED = variants_where(lambda spec: spec.costs(9).width > 0)


Steps = list[tuple[int, int]]


def decoded(
    model: Transformer, num_samples: int, steps: Steps, found: CDLL, threads: int = 1
) -> Iterator[tuple[Ids, int, np.ndarray]]:
    """Windows, and the logits after `total` of their tokens, of which `known` were there before."""
    decoder = NativeDecoder(native_model(model, found), num_samples, threads)
    length = max(total for _, total in steps)
    for known, total in steps:
        if known == 0:
            ids_BS = torch.randint(model.vocab_size, (num_samples, length)).numpy()
        yield ids_BS, total, decoder.logits(ids_BS[:, :total], known).copy()


def assert_textbook(model: Transformer, *how: Any, **threads: Any) -> None:
    before_BS: Ids | None = None
    for ids_BS, total, got_BV in decoded(model, *how, **threads):
        if ids_BS is not before_BS:
            before_BS, book_BSV = ids_BS, by_the_book(model, torch.from_numpy(ids_BS)).detach()
        expected_BV = book_BSV[:, total - 1].numpy()
        assert_near(got_BV, expected_BV)
        assert np.ptp(expected_BV) > 1e-3


REFILLS = [(0, 1), (1, 2), (2, 7), (7, 8), (8, BLOCK), (0, BLOCK), (0, 3), (3, 4)]


@pytest.mark.parametrize("name", EMBEDDED)
def test_logits_equal_the_textbook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_samples, threads in ((1, 1), (3, 1), (1, 2), (3, 2), (2, 5)):
        assert_textbook(a_model(name), num_samples, REFILLS, library(), threads=threads)
    monkeypatch.setattr(native_decoder, "_LARGE_MODEL", 0)
    assert_textbook(a_model(name), 3, [(0, 7), (7, 8)], library(), threads=3)


LONG = [(0, 70), (70, 71), (71, 79), (79, 80), (0, 80), (0, 40), (40, 41)]


@pytest.mark.parametrize("width", SETS)
@pytest.mark.parametrize("num_samples", [1, 24])
@pytest.mark.parametrize(("head_size", "vocab_size"), [
    (1, 2), (2, 31), (3, 32), (5, 33), (8, 65), (15, 300), (16, 2), (17, 31), (24, 32), (32, 33),
])  # fmt: skip
def test_prompts_of_many_tokens_and_odd_sizes(
    width: str, head_size: int, vocab_size: int, num_samples: int
) -> None:
    """More rows than go through the layers together, in each width of vectors."""
    sizes: Settings = {"embed_dim": 9, "heads": 3, "head_size": head_size, "block_size": 80}
    positions = "learned" if head_size % 2 else "rotary"
    model = a_model(f"qwen3:kv_heads=1:positions={positions}", vocab_size, **sizes)
    assert_textbook(model, num_samples, LONG, library(width))
    model = a_model("multi-head:projection=true:qkv_bias=true", vocab_size, **sizes)
    assert_textbook(model, num_samples, [(0, 65), (0, 80)], library(width))


def test_wide_models_and_large_vocabularies() -> None:
    for width, vocab_size in ((70, 50_257), (1026, V)):
        name = "transformer:heads=1:layers=1:mlp_width=3"
        model = a_model(name, vocab_size, embed_dim=width, block_size=5)
        assert_textbook(model, 2, [(0, 3), (3, 4)], library())


@pytest.mark.parametrize("width", SETS)
@pytest.mark.parametrize("members", [1, 2, 5])
def test_large_models_use_threads(
    width: str, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More members than some parts have pieces, and few tokens or many."""
    monkeypatch.setattr(native_decoder, "_LARGE_MODEL", 0)
    monkeypatch.setattr(native_decoder, "_MOST_ROWS_OF_LARGE", 50)
    grouped = "qwen3:kv_heads=2:head_size=10:qkv_bias=true"
    for name in ("gpt2:mlp_width=160", grouped, "llama:heads=2:mlp=none"):
        model = a_model(name, 99, embed_dim=64, block_size=80)
        for num_samples in (1, 3):
            assert_textbook(model, num_samples, LONG, library(width), members)
    monkeypatch.setattr(native_decoder, "_MOST_ROWS_OF_LARGE", 41)
    model = a_model("gpt2", embed_dim=64, block_size=80)
    native = native_model(model, library(width))
    for total in (1, 40, 70):
        assert_rows_alike(native, 7, total, total + 1)


@pytest.mark.parametrize("name", EMBEDDED[:12])
@pytest.mark.parametrize("factor", [30.0, 1e4])
def test_large_scores_and_activations_do_not_overflow(factor: float, name: str) -> None:
    model = a_model(name)
    with torch.no_grad():
        for weights, parameter in model.named_parameters():
            if any(part in weights for part in ("query", "gate", "up")):
                parameter.mul_(factor)
    expected_BV = by_the_book(model, ids_BS := some_ids(1, BLOCK))[:, -1].detach().numpy()
    got_BV = NativeDecoder(native_model(model, library()), 1).logits(ids_BS.numpy(), 0)
    scale = float(np.abs(expected_BV).max())
    np.testing.assert_allclose(got_BV / scale, expected_BV / scale, atol=1e-3, rtol=0)


@pytest.mark.parametrize("wrong", [-1, V, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    native = native_model(a_model("transformer"), library())
    with pytest.raises(IndexError):
        NativeDecoder(native, 1).logits(np.array([[0, wrong, 1]]), 0)


@pytest.mark.parametrize("model", ["transformer", "multi-head"])
def test_a_sample_does_not_depend_on_the_others(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 1,000 tokens, and divided among threads."""
    library()
    monkeypatch.setattr(native_decoder, "cores", lambda: 3)
    monkeypatch.setattr(native_decoder, "_FEWEST_SHARED", 20_000)
    letters = CharTokenizer("".join(map(chr, range(ord("A"), ord("A") + V))))
    sampler = sampler_of(a_model(model, embed_dim=36, block_size=33), letters, CPU)
    one, many = (
        sampler.samples([[3, 1]], SamplingConfig(tokens=1000, num_samples=count, seed=8))[0]
        for count in (1, 64)
    )
    assert one == many[:1] and list(map(len, many)) == [1000] * 64
    assert len(set(many)) == 64


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("width", SETS)
def test_rows_do_not_depend_on_the_batch_size(width: str, name: str) -> None:
    assert_rows_alike(native_model(a_model(name), library(width)), 24, 10, BLOCK)


def assert_rows_alike(native: NativeModel, samples: int, known: int, total: int) -> None:
    """Assert that the logits of a window do not depend on other windows, bit by bit."""
    ids_BS = torch.randint(V, (samples, total)).numpy()
    many = NativeDecoder(native, samples, 3)
    both = many.logits(ids_BS[:, :known], 0).copy(), many.logits(ids_BS, known).copy()
    for count in (1, 2, 3, 5, 13):
        ids_bS, few = ids_BS[:count], NativeDecoder(native, min(count, samples))
        assert np.array_equal(few.logits(ids_bS[:, :known], 0), both[0][:count])
        assert np.array_equal(few.logits(ids_bS, known), both[1][:count])


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_model_is_decoded_in_c(name: str) -> None:
    library()
    events: list[object] = []
    decoder = decoders_of(a_model(name), CPU, events.append)(1)
    assert isinstance(decoder, NativeDecoder) and not events


def test_a_model_changed_from_outside_decodes_by_itself_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library()
    place, other = CHANGES["another scale"]
    monkeypatch.setattr(f"attnlm.model.{place}", other)
    model, events = a_model("transformer"), list[object]()
    decoder = decoders_of(model, CPU, events.append)(1)
    assert isinstance(decoder, ModuleDecoder)
    (note,) = events
    assert isinstance(note, Note) and "slower" in note.text
    ids_BS = some_ids(1, BLOCK)
    assert_near(decoder.logits(ids_BS.numpy(), 0), model(ids_BS)[:, -1].detach())


@pytest.mark.compilers
@pytest.mark.timeout(900)  # a minute of CPU time
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """In tests of all kernels, with libraries that end the process where they find something."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no cc to ask for libasan")
    asked = [
        subprocess.run([compiler, word], capture_output=True, text=True).stdout.strip()
        for word in ("-print-file-name=libasan.so", "-print-file-name=libstdc++.so.6")
    ]
    if not all(Path(library).is_absolute() for library in asked):
        pytest.skip("the compiler has no libasan")
    folder = Path(native.__file__).parent
    package = shutil.copytree(folder.parents[1], tmp_path / "attnlm", ignore=lambda *_: KERNELS)
    path = package / "compute" / "native" / f"kernels-{SETS[-1]}{native._SUFFIX}"
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_native(compiler, path, *flags, "-march=native")
    tests = Path(__file__).parents[1]
    files = (__file__, tests / "model/test_block.py", tests / "training/test_one_layer.py")
    chosen = "(textbook or odd_sizes or in_place or gradients)"
    chosen += "".join(f" and not {name}" for name in SETS[:-1])  # only one is compiled here
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not variants", "-k", chosen, *map(str, files)],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            native.VARIABLE: SETS[-1],
            "LD_PRELOAD": " ".join(asked),  # exceptions of PyTorch need libstdc++ there
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        cwd=tests.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
