"""How the process begins: what is set before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = """
import os, sys
import attnlm.cli.app
from attnlm.__main__ import main

def command():
    assert "torch" not in sys.modules
    print(os.environ.get("GOMP_SPINCOUNT"))

attnlm.cli.app.run_command = command
main()
"""


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_that_wait_soon_sleep_unless_the_user_said_how(
    given: dict[str, str], count: str
) -> None:
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{count}\n"


def test_the_library_leaves_the_environment_as_it_is() -> None:
    command = """
import os
before = dict(os.environ)
import attnlm.experiments.train
assert before == os.environ
"""
    subprocess.run([sys.executable, "-c", command], check=True)
