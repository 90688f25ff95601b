"""`python -m tools.changed`: which tests beside those of `make test` a change asks for.

Prints markers of tests and targets of the Makefile in one line. The change is what git knows since
the commit in .ci/green, at which `make test-all` passed, and what is not committed yet.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_EVERYTHING = frozenset({"pages", "documents", "compilers", "variants", "oldest", "arm64"})
_MOST_FILES = 60
_BY_PATH = {
    r"pyproject\.toml|constraints\.txt|Makefile|\.ci/run|tests/\w+\.\w+|tools/.*": _EVERYTHING,
    r"(src/attnlm|tests)/see/.*|docs/gallery/.*": {"pages"},
    r"(src/attnlm|tests)/cli/.*|tests/project/.*|(docs|examples|benchmarks)/.*|\w+\.md": {
        "documents"
    },
    r"(src/attnlm|tests)/(compute|training)/.*": {"compilers"},
    r"(src/attnlm|tests)/(model|generation)/.*": {"variants"},
    r"src/attnlm/.*\.[ch]|hatch_build\.py": {"compilers", "variants", "arm64"},
}


def asked_for(paths: Iterable[str] | None) -> set[str]:
    """Return what a change of these paths asks for; None stands for an unknown change."""
    if paths is None or len(changed := list(paths)) > _MOST_FILES:
        return {*_EVERYTHING}
    return {
        asked
        for pattern, all_asked in _BY_PATH.items()
        if any(re.fullmatch(pattern, path) for path in changed)
        for asked in all_asked
    }


def _changed_paths() -> list[str] | None:
    """Return the paths that changed since the green commit; None if there is none in git."""
    green = _ROOT / ".ci" / "green"
    if not green.exists():
        return None
    commit = green.read_text(encoding="utf-8").strip()
    changed = ["git", "diff", "--name-only", "--no-renames", commit]
    new = ["git", "ls-files", "--others", "--exclude-standard"]
    paths: list[str] = []
    for command in (changed, new):
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            return None
        paths += done.stdout.splitlines()
    return paths


if __name__ == "__main__":
    print(*sorted(asked_for(_changed_paths())))
