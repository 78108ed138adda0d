"""cluster/slurm.sbatch on one node and on two, with substitutes for Slurm's scontrol and srun."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hosts
import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster" / "slurm.sbatch"


SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
trap 'kill $first $second 2> /dev/null' TERM
while wait $first; wait $second; kill -0 $first 2> /dev/null || kill -0 $second 2> /dev/null; do :; done
"""
"""Starts a task for each of two nodes, and passes SIGTERM on."""

GETENT = '#!/bin/sh\necho "10.77.0.$((1 + ${SLURM_PROCID:-0})) STREAM host"\n'
NETWORK = "ip link set lo up && ip address add 10.77.0.1/32 dev lo && ip address add 10.77.0.2/32 dev lo"


def start(tmp_path: Path, line: str, late: bool = False, slurm: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the script with a command of the shell; late: as if the job had run for more than a minute."""
    (tmp_path / "bin").mkdir()
    scontrol = f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n'
    for name, text in (("scontrol", scontrol), ("srun", SRUN), ("getent", GETENT)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    where = {"PATH": path, "HOME": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    before = ["bash", "-c", f"SECONDS=100; . {SCRIPT}", "job"] if late else ["bash", str(SCRIPT)]
    if "SLURM_JOB_NUM_NODES" in (slurm or {}):  # the nodes are addresses on one loopback interface
        before = ["unshare", "--net", "sh", "-c", f'{NETWORK} && exec "$@"', "network", *before]
    return subprocess.Popen(
        [*before, *(["sh", "-c", line, "sweep"] if line else [])],
        cwd=ROOT, env=clean | where | (slurm or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("late", "turns", "code"), [(True, "0", 143), (True, "100", 2), (False, "0", 2)])
def test_the_signal_ends_the_sweep_and_requeues_the_job_unless_it_would_do_so_for_ever(
    late: bool, turns: str, code: int, tmp_path: Path
) -> None:
    job = start(tmp_path, "echo started; exec sleep 60", late, {"SLURM_RESTART_COUNT": turns})
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == code
    assert (tmp_path / "asked").exists() == (code == 143)
    if code == 143:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("line", "slurm", "code", "word"),
    [
        ("exit 5", {}, 5, ""),
        ('echo "$@"', {}, 0, "\n"),
        ('echo "$@"', {"SLURM_RESTART_COUNT": "1"}, 0, "--resume"),
        ("", {}, 2, "name the command"),
        ("echo", {"SLURM_SUBMIT_DIR": "/"}, 2, "folder of the code"),
        ("echo", {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": ""}, 2, "GPUs"),
    ],
)
def test_exit_code_resume_and_refusals(line: str, slurm: dict[str, str], code: int, word: str, tmp_path: Path) -> None:
    job = start(tmp_path, line, slurm=slurm)
    output = "".join(job.communicate(timeout=120))
    assert job.returncode == code
    assert word in output
    assert ("--resume" in output) == ("SLURM_RESTART_COUNT" in slurm)
    assert not (tmp_path / "asked").exists()


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_two_nodes_join_run_a_sweep_and_leave_nothing(tmp_path: Path) -> None:
    if why := hosts.missing():
        pytest.skip(why)
    sweep = "python sweeps/table1.py --preset smoke --wandb off --algorithms fedavg --settings real --alphas 0.1"
    line = f"echo folder=$FOLDER. && exec {sweep} --out {tmp_path}/out --artifacts {tmp_path}/artifacts"
    job = start(tmp_path, line, slurm={"SLURM_JOB_NUM_NODES": "2"})
    output = "".join(job.communicate(timeout=300))
    assert job.returncode == 0, output
    assert " 2 node(s)" in output
    (folder,) = re.findall(r"folder=(/tmp/fc-\w+)\.", output)
    assert not Path(folder).exists()
    assert not [*(tmp_path / ".fedcommons").iterdir()]
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [each for each in lines if folder in each]
