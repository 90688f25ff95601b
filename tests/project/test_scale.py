"""docs/scale.md is true: its scripts are valid and start what attnlm takes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attnlm.cli.app import root_command
from tests.kit import command
from tests.project.documents import ROOT, commands_in

SBATCH, SKY = (ROOT / "docs" / "scale" / name for name in ("train.sbatch", "train.sky.yaml"))
CLUSTER = {
    "SLURM_JOB_NODELIST": "node[1-8]",
    "SLURM_JOB_ID": "77",
    "SLURM_NNODES": "8",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
needs_bash = pytest.mark.skipif(sys.platform == "win32", reason="bash")


def started(script: str, folder: Path) -> list[str]:
    """The command that a script starts on a cluster, of which there is only the surface."""
    tools = folder / "tools"
    tools.mkdir()
    for name, body in {
        "scontrol": "printf 'node1\\nnode2\\n'",
        "srun": 'while [ "$1" != torchrun ]; do shift; done; "$@"',
        "torchrun": "printf '%s\\0' torchrun \"$@\"",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**CLUSTER, "PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.rstrip("\0").split("\0")


def torchruns(command: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse a torchrun command; return its options and the arguments of `attnlm`."""
    from torch.distributed.run import parse_args

    parsed = parse_args(command[1:])
    assert parsed.module and parsed.training_script == "attnlm"
    return vars(parsed), parsed.training_script_args


def resolved(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Return the configuration that `attnlm train` makes from these arguments."""
    return tomllib.loads(command(*arguments, "--print-config", cwd=folder).stdout)


@needs_bash
def test_the_sbatch_script_starts_a_training(tmp_path: Path) -> None:
    script = SBATCH.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", SBATCH], check=True)
    assert script.startswith("#!/bin/bash\n")
    told, arguments = torchruns(started(script, tmp_path))
    assert (told["nnodes"], told["nproc_per_node"], told["rdzv_id"]) == ("8", "8", "77")
    assert (told["rdzv_backend"], told["rdzv_endpoint"]) == ("c10d", "node1:29500")
    config = resolved(arguments, tmp_path)
    assert config["layers"] == 16 and config["batch_size"] % (8 * 8) == 0


@needs_bash
def test_started_again_it_resumes(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "one-billion").mkdir(parents=True)
    _, arguments = torchruns(started(SBATCH.read_text(encoding="utf-8"), tmp_path))
    assert arguments == ["train", "--resume", "one-billion"]


@needs_bash
def test_the_skypilot_task_starts_the_same_training(tmp_path: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")
    task = yaml.safe_load(SKY.read_text(encoding="utf-8"))
    assert task["num_nodes"] == 8 and task["resources"]["accelerators"] == "H100:8"
    told, arguments = torchruns(started(task["run"], tmp_path))
    assert (told["node_rank"], told["master_addr"]) == (1, "10.0.0.1")
    (tmp_path / "slurm").mkdir()
    _, others = torchruns(started(SBATCH.read_text(encoding="utf-8"), tmp_path / "slurm"))
    assert resolved(arguments, tmp_path) == resolved(others, tmp_path)
    (prepare,) = (words for words in commands_in(task["setup"]) if words[0] == "prepare")
    context = root_command().get_command(None, "prepare").make_context("prepare", prepare[1:])
    assert context.params["name"] == arguments[1]
    assert list(context.params["source"]) == ["$SOURCE"]
