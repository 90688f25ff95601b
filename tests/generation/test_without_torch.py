"""PyTorch takes seconds to import: commands that do not compute with it do not load it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.models import needs_kernels

SAMPLE = ["sample", "--tokens", "20", "--seed", "1"]
COMMANDS = [
    SAMPLE,
    [*SAMPLE, "bigram", "--top-k", "3"],
    [*SAMPLE, "--num-samples", "3", "--prompt", "the"],
    [*SAMPLE, "--show-probs"],
    [*SAMPLE, "--prompt", "fox", "--json"],
    ["sample", "-i", "--tokens", "20"],
    ["list"],
    ["export", "tied", "page.html", "--to", "html"],
]
PROGRAM = """
import json, sys
from attnlm.cli.app import run_command
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    run_command()
    assert "torch" not in sys.modules, command
"""


@needs_kernels
def test_to_sample_list_and_export_a_page_does_not_load_torch(
    trained: Path, tmp_path: Path
) -> None:
    for folder in ("data", "checkpoints"):
        (tmp_path / folder).symlink_to(trained / folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)],
        cwd=tmp_path,
        input="a dog\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").exists()
