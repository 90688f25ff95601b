"""`python -m tests.package`: the wheel and the sdist, built twice, checked, installed, and used."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from attnlm import __version__

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
_SUFFIXES = {".py", ".c", ".h", ".toml", ".html", ".css", ".js", ".svg", ".typed"}
_MUST_HAVE = {
    *("attnlm/py.typed", "attnlm/compute/native/decoding.c", "attnlm/recipes/r2-bigram.toml"),
    *("attnlm/see/pages/report.html", f"attnlm-{__version__}.dist-info/licenses/LICENSE"),
}
_SDIST_HAS = {"README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt"}
_COMMANDS = (
    ("prepare", "tales"),
    ("train", "--steps", "20", "--seed", "1"),
    ("sample", "--tokens", "50", "--seed", "1"),
)


def main() -> None:
    """Exit with an error where a check fails. What was built lies in dist/."""
    with tempfile.TemporaryDirectory() as temporary:
        first, second = (_built(Path(temporary) / name) for name in ("first", "second"))
        assert first.keys() == second.keys() and len(first) == 2, list(first)
        for name in first:
            assert first[name] == second[name], f"{name} differs from build to build"
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob("attnlm-*"):
            old.unlink()
        for name, content in first.items():
            (DIST / name).write_bytes(content)
        files = sorted(DIST.glob("attnlm-*"))
        _run(sys.executable, "-m", "twine", "check", "--strict", *files)
        (wheel,) = DIST.glob("*.whl")
        (sdist,) = DIST.glob("*.tar.gz")
        _check_contents(wheel, sdist)
        _try(wheel, Path(temporary))
    for path in files:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")


def _tracked(folder: str) -> list[str]:
    """Return the paths of the files below a folder of the repository that git tracks."""
    command = ["git", "ls-files", "-z", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, encoding="utf-8")
    return listed.stdout.split("\0")[:-1]


def _built(folder: Path) -> dict[str, bytes]:
    """From a copy of what git tracks, as a release would be."""
    source = folder / "source"
    for name in _tracked("."):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, "-m", "build", "--outdir", folder / "dist", source)
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def _check_contents(wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= _MUST_HAVE, _MUST_HAVE - names
    package = {name for name in names if not name.startswith(f"attnlm-{__version__}.dist-info/")}
    assert package == {name.removeprefix("src/") for name in _tracked("src")}
    strange = {name for name in package if Path(name).suffix not in _SUFFIXES}
    assert not strange, strange
    with tarfile.open(sdist) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    assert inside >= _SDIST_HAS, _SDIST_HAS - inside
    assert {name.partition("/")[0] for name in inside} >= {"src", "tests", "docs", "benchmarks"}


def _try(wheel: Path, folder: Path) -> None:
    """The three commands, in an environment that has the wheel and what it needs."""
    environment, place = folder / "environment", folder / "place"
    place.mkdir()
    _run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pinned = ("--quiet", "--constraint", ROOT / "constraints.txt")
    _run(python, "-m", "pip", "install", *pinned, "torch")
    _run(python, "-m", "pip", "install", *pinned, wheel)
    for command in _COMMANDS:
        _run(environment / "bin" / "attnlm", *command, cwd=place)
    _run(python, "-m", "attnlm", "--version", cwd=place)


def _run(*command: object, cwd: Path = ROOT) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    if subprocess.run(words, cwd=cwd, env=variables).returncode:
        sys.exit(f"failed: {' '.join(words)}")


if __name__ == "__main__":
    main()
