"""Which GPU each process gets, where Ray has two GPUs that are not there, named as on a GPU cut into MIG slices.

This file is also a program: run as a script it starts such a Ray and writes which GPUs its processes saw.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fedcommons import UserError, experiment, load_rounds, sweep
from fedcommons.runtime import allocation, ray_cluster

NAMES = "MIG-d0f2,GPU-8a31"
WHERE = '''
"""FedAvg with the metric ``second``: the share of the clients that were trained on the second GPU."""
import os, time
from dataclasses import dataclass, replace
from pathlib import Path
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Reply

@dataclass(frozen=True)
class Where(FedAvg):
    meet: int = 1  # the number of processes that wait for each other, so that no process does the work of two

    def client(self, *args, **named) -> Reply:
        (gpu,) = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        Path(f"{__file__}.{self.meet}.{os.getpid()}").touch()
        for _ in range(600):
            if len(list(Path(__file__).parent.glob(f"*.{self.meet}.*"))) >= self.meet:
                break
            time.sleep(0.1)
        return replace(super().client(*args, **named), metrics={"second": float(gpu == "GPU-8a31")})
'''
FIELDS = {"federation.rounds": 1, "measure.every": 0, "data.limit": 80, "partition.n_clients": 6}


@pytest.mark.parametrize(
    ("names", "number"),
    [("", None), ("0,1", None), ("GPU-8a31,GPU-77b0", None), ("MIG-d0f2,MIG-d0f3, MIG-d0f4", 3), ("MIG-GPU-8a/1/0", 1),
     ("-1", 0), ("1, -1,0", 1), ("none", 0), ("void", 0), ("0,", 1), ("MIG-d0f2,", 1), ("NoDevFiles", 0)],
)  # fmt: skip
def test_gpus_are_counted_if_ray_counts_others(names: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert allocation.gpus() == number


def main(folder: Path) -> None:
    """Write to ``folder`` the metric of two trials with several actors, and of two trials of one process."""
    import ray

    ray_cluster.connect(num_cpus=4)
    os.chdir(folder)
    Path("where.py").write_text(WHERE, encoding="utf-8")
    results: dict[str, Any] = {"gpus": ray.cluster_resources()["GPU"]}
    several = [{"federation.executor": "ray_actors", "federation.actors": n, "federation.gpus_per_actor": share}
               for n, share in ((3, 0.3), (2, 0.6))]  # fmt: skip
    for name, rows in (("several", several), ("single", [{"where.meet": 2}] * 2)):
        configs = [
            experiment("smoke", algorithm="where.py:Where", values={**FIELDS, **row, "seed": seed})
            for seed, row in enumerate(rows)
        ]
        sweep(configs, name)
        rounds = load_rounds(name).dropna(subset="train/second")
        results[name] = [rounds["train/second"][rounds["seed"] == seed].tolist() for seed in (0, 1)]
    try:
        ray_cluster.require_actors(3, 0.6)
    except UserError as error:
        results["refused"] = str(error)
    Path("found.json").write_text(json.dumps(results), encoding="utf-8")


@pytest.mark.ray
def test_trials_and_actors_with_shares_that_do_not_add_to_one_each_get_one_gpu(tmp_path: Path) -> None:
    """Three actors with 0.3 share a GPU, two with 0.6 do not, and two trials of one process get one GPU each."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "SLURM_"))}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=600,
            env={**ours, "RAY_TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": NAMES},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "found.json").read_text())
    assert results["gpus"] == 2
    assert results["several"] in ([[0], [0.5]], [[1], [0.5]])
    assert sorted(results["single"]) == [[0], [1]]
    assert "room for 2" in results["refused"]
    assert "parts of two GPUs" in results["refused"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
