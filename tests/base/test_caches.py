"""The cache of the code that PyTorch compiles: a folder of the user, or a new temporary one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from attnlm.compute.device import choose_device
from attnlm.config.settings import resolve
from attnlm.model.ops import Kernels
from attnlm.training.state import initial_state
from attnlm.training.step import Replica


@pytest.mark.parametrize("named", ["", "elsewhere"])
@pytest.mark.parametrize("cache", ["cache", "/dev/null/cache"])
def test_every_compiling_process_uses_the_cache(
    named: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks other than 0, which receive the resolved configuration, keep their code there too."""
    found: list[Path] = []

    def compiled(function: object, *, options: dict[str, object]) -> object:
        # PyTorch keeps precompiled headers in the temporary folder, under a name that all know.
        assert not any(options.values()) and options.keys() <= {"cpp_cache_precompile_headers"}
        assert options or "cpp_cache_precompile_headers" not in torch._inductor.list_options()
        found.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        return function

    monkeypatch.setenv("ATTNLM_CACHE_DIR", str(tmp_path / cache))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    config = resolve({"model": "bigram", "compile": "on", "steps": 1, "threads": 1, "seed": 1})
    state = initial_state(config, 10, choose_device("cpu"))
    Replica(state.model, state.optimizer.gradient, config, state.device, Kernels(), windows=1)
    if named:
        assert found == [Path(named)]
    else:
        is_temporary = cache.startswith("/dev")
        assert found[0].parents[is_temporary] == (tmp_path if is_temporary else tmp_path / cache)
        assert found[0].stat().st_mode & 0o777 == 0o700
