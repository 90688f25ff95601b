"""`python -m tools.check_packages`: the sdist and a wheel for each system, installed and used.

Everything is built twice, from copies of what git tracks, and must be the same both times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from attnlm import __version__
from hatch_build import TARGETS

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
_NATIVE = "attnlm/compute/native"
_SUFFIXES = {".py", ".toml", ".html", ".css", ".js", ".svg", ".typed"}
_MUST_HAVE = {
    *("attnlm/py.typed", "attnlm/recipes/r2-bigram.toml", "attnlm/see/pages/report.html"),
    f"attnlm-{__version__}.dist-info/licenses/LICENSE",
}
_SDIST_HAS = {
    *("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt"),
    *("hatch_build.py", f"src/{_NATIVE}/decoding.c", f"src/{_NATIVE}/simd.h"),
}
# How a shared library of each system begins.
_MAGIC = {".so": b"\x7fELF", ".dylib": b"\xcf\xfa\xed\xfe", ".dll": b"MZ"}
# The numerical tests of the C files.
_TESTS = (
    *("model/test_ops", "model/test_block", "model/test_textbook"),
    *("generation/test_native_decoder", "training/test_one_layer", "training/test_golden_losses"),
)
_HERE = "manylinux_2_28_x86_64"


def main() -> None:
    """Exit with an error where a check fails. What was built lies in dist/."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        first, second = (_built(place / name, place / "zig") for name in ("first", "second"))
        assert first.keys() == second.keys() and len(first) == 1 + len(TARGETS), list(first)
        for name in first:
            assert first[name] == second[name], f"{name} differs from build to build"
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob("attnlm-*"):
            old.unlink()
        for name, content in first.items():
            (DIST / name).write_bytes(content)
        files = sorted(DIST.glob("attnlm-*"))
        _run(sys.executable, "-m", "twine", "check", "--strict", *files)
        (sdist,) = DIST.glob("*.tar.gz")
        _check_sdist(sdist)
        for tag in TARGETS:
            _check_wheel(tag)
        _try(_wheel(_HERE), place)
        _run(sys.executable, "-m", "tools.on_processors", "zig", "Windows")
    for path in files:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")


def _wheel(tag: str) -> Path:
    return DIST / f"attnlm-{__version__}-py3-none-{tag}.whl"


def _tracked(folder: str) -> list[str]:
    """Return the paths of the files below a folder of the repository that git tracks."""
    command = ["git", "ls-files", "-z", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, encoding="utf-8")
    return listed.stdout.split("\0")[:-1]


def _built(folder: Path, cache: Path) -> dict[str, bytes]:
    """Build from a copy of what git tracks, like a release. zig keeps its parts in `cache`."""
    source = folder / "source"
    for name in _tracked("."):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = (sys.executable, "-m", "build", "--outdir", folder / "dist", source)
    _run(*build, "--sdist")
    for tag in TARGETS:
        caches = {f"ZIG_{kind}_CACHE_DIR": str(cache) for kind in ("GLOBAL", "LOCAL")}
        _run(*build, "--wheel", variables={"ATTNLM_WHEEL": tag, **caches})
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def _check_wheel(tag: str) -> None:
    target, suffix = TARGETS[tag]
    sets = ("sse4.2", "avx2", "avx512") if target.startswith("x86_64") else ("neon",)
    kernels = {f"{_NATIVE}/kernels-{name}{suffix}" for name in sets}
    with zipfile.ZipFile(_wheel(tag)) as archive:
        names = set(archive.namelist())
        for name in kernels:
            assert archive.read(name).startswith(_MAGIC[suffix]), name
    assert names >= _MUST_HAVE, _MUST_HAVE - names
    package = {name for name in names if not name.startswith(f"attnlm-{__version__}.dist-info/")}
    sources = {name.removeprefix("src/") for name in _tracked("src")}
    assert package == {n for n in sources if Path(n).suffix not in (".c", ".h")} | kernels
    strange = {name for name in package - kernels if Path(name).suffix not in _SUFFIXES}
    assert not strange, strange


def _check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    assert inside >= _SDIST_HAS, _SDIST_HAS - inside
    assert {name.partition("/")[0] for name in inside} >= {"src", "tests", "docs", "benchmarks"}
    assert not [name for name in inside if "/kernels-" in name]


def _try(wheel: Path, folder: Path) -> None:
    """Use the wheel in an environment that has only what the wheel needs, then test its kernels."""
    environment = folder / "environment"
    _run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pinned = ("--quiet", "--constraint", ROOT / "constraints.txt")
    _run(python, "-m", "pip", "install", *pinned, "torch")
    _run(python, "-m", "pip", "install", *pinned, wheel)
    _run(python, "-m", "tools.use_installed")
    tools = ("hatchling", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
    _run(python, "-m", "pip", "install", *pinned, *tools)
    tests = [f"tests/{name}.py" for name in _TESTS]
    left_out = ("-k", "not sanitizers", "-p", "no:cacheprovider", "-n", "2", "-m", "not slow")
    _run(python, "-m", "pytest", *left_out, *tests)


def _run(*command: object, variables: dict[str, str] | None = None) -> None:
    without_path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    if subprocess.run(words, cwd=ROOT, env=without_path | (variables or {})).returncode:
        sys.exit(f"failed: {' '.join(words)}")


if __name__ == "__main__":
    main()
