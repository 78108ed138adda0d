"""Nodes of several kinds: their labels, which kind is chosen, what runs where, and the bits that it gives.

This file is also a program: run as a script it starts such nodes and writes what it finds on them.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from platform import machine
from typing import Any
from unittest import mock

import pytest

from fedcommons import LocalSGD, UserError, experiment
from fedcommons.algorithms.fedgen import FedGEN
from fedcommons.core.evaluation import ModelTask
from fedcommons.federation.ray_executor import RayActors
from fedcommons.runtime import allocation, cpu_kind, ray_cluster
from fedcommons.runtime.cpu_kind import CHOICE, CPU, GPU, TORCH
from fedcommons.testing import digits
from fedcommons.testing.elsewhere import require_the_bits_of_one_process
from fedcommons.tune.gpu_share import with_share

OURS = cpu_kind.labels()[TORCH]
HERE = {CPU: cpu_kind.cpu(), TORCH: OURS}
INTEL = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nflags\t\t: fpu sse4_1 avx avx2 avx512f"
)


def node(cpu: str = "", torch: str = OURS, cores: float = 2, alive: bool = True, **resources: float) -> dict[str, Any]:
    """Return a node as ``ray.nodes()`` has it."""
    labels = {CPU: cpu, TORCH: torch} if cpu else {}
    labels |= {GPU: "A10G"} if resources else {}
    resources = {"CPU": cores, "memory": 1e9, **resources}
    return {"Alive": alive, "Labels": labels, "Resources": resources, "NodeManagerHostname": f"h{cores}"}


def test_a_cpu_is_named_by_its_maker_model_and_widest_instructions(tmp_path: Path) -> None:
    """A machine's first core stands for all."""
    for text, name in (
        (INTEL, "intel-6-143-avx512"),
        (f"{INTEL} amx_tile", "intel-6-143-amx"),
        (INTEL.replace("GenuineIntel", "AuthenticAMD").replace("avx2 avx512f", "avx2"), "amd-6-143-avx2"),
        (INTEL.replace("GenuineIntel", "Other Maker, Inc."), "Other-Maker-Inc.-6-143-avx512"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40", f"{machine()}-0x41-0xd40"),
        ("", machine()),
    ):
        (tmp_path / "cpuinfo").write_text(f"{text}\n\n{text.replace('143', '7')}\n")
        assert cpu_kind.cpu(tmp_path / "cpuinfo") == name
    assert cpu_kind.cpu(tmp_path / "absent")


MIXED = [node("b", cores=3), node("a"), node("a"), node("c", cores=99, alive=False), node(cores=99)]
WITH_GPU = [node("a", cores=99), node("b", GPU=1)]
OLD = [node("a", torch="1.0", cores=9), node("a")]


def test_the_kind_with_most_cores_or_gpus_or_that_the_user_names_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, gpus, choice, expected in (
        (MIXED, 0, "", {CPU: "a", TORCH: OURS}),  # most cores in all
        ([node("b"), node("a")], 0, "", {CPU: "a", TORCH: OURS}),  # of equal ones the first by name
        (MIXED, 0, "b", {CPU: "b", TORCH: OURS}),
        (WITH_GPU, 0, "", {CPU: "a", TORCH: OURS}),
        (WITH_GPU, 0.25, "", {CPU: "b", TORCH: OURS, GPU: "A10G"}),
        (OLD, 0, "", {CPU: "a", TORCH: OURS}),
        ([node(), node()], 0, "", {}),
    ):
        monkeypatch.setenv(CHOICE, choice)
        assert cpu_kind.choose_kind(nodes, gpus) == expected
    for nodes, choice, message in (
        (MIXED, "bb", r"'bb'; did you mean 'b'\? The nodes have a, b\."),
        ([node()], "b", "No node of Ray has a label"),
        (
            [*OLD, node("b", torch="0.9"), node("b", torch="0.9", cores=9, alive=False)],
            "b",
            r"host h2 has torch 0\.9, and this machine",
        ),
    ):
        monkeypatch.setenv(CHOICE, choice)
        with pytest.raises(UserError, match=message):
            cpu_kind.choose_kind(nodes, 0)


def test_resources_and_words_are_of_the_chosen_nodes() -> None:
    assert cpu_kind.resources(MIXED, {CPU: "a"})["CPU"] == 4
    assert cpu_kind.resources(OLD, cpu_kind.choose_kind(OLD, 0))["CPU"] == 2
    assert cpu_kind.describe_nodes(MIXED, cpu_kind.choose_kind(MIXED, 0)) == (
        f"2 node(s) a; not used: host h3 (b with torch {OURS}); not used: host h99 (unlabelled with torch unlabelled)"
    )
    assert cpu_kind.describe_nodes([node(), node()], {}) == "2 node(s)"


def test_slurm_leaves_a_number_of_cores_and_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    there = len(os.sched_getaffinity(0))
    for asked in ("1000", "1"):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", asked)
        assert (allocation.cores() or os.cpu_count()) == min(there, int(asked))
    for wrong in ("abc", "0", "-1", "9" * 5000):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", wrong)
        with pytest.raises(UserError, match=r"^SLURM_CPUS_PER_TASK .{,150}$"):
            allocation.cores()


METHOD = FedGEN()  # whose server trains on a worker, too
FEDERATION = digits(dropout=0.3, method=METHOD).training(LocalSGD(epochs=2, batch_size=5, augment=True))


def where(worker: Any, shared: Any, job: int) -> list[Any]:
    """Return the labels and id of this process's Ray node, and the GPUs that this process sees."""
    import ray

    context = ray.get_runtime_context()
    labels = context.get_node_labels()
    return [{CPU: labels[CPU], TORCH: labels[TORCH]}, context.get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")]


def actors(number: int, gpus: float = 0, wait_s: float = 60) -> RayActors:
    return RayActors(FEDERATION.build(METHOD), FEDERATION.data, number, gpus, wait_s)


def refused(call: Callable[[], Any]) -> str:
    try:
        return f"not refused: {call()}"
    except UserError as error:
        return str(error)


def main(folder: Path) -> None:
    """Write to ``folder`` the results of nodes of several kinds, one after another."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {CPU: "odd", TORCH: OURS}})
    for _ in range(2):
        nodes.add_node(num_cpus=1, labels=HERE)
    os.environ |= {"RAY_ADDRESS": str(nodes.address), CHOICE: cpu_kind.cpu()}  # of the driver alone
    ray_cluster.connect()
    two = actors(2)
    results: dict[str, Any] = {"actors": two.map(where, ModelTask(FEDERATION.model), [0, 1])}
    require_the_bits_of_one_process(METHOD, FEDERATION, two)
    two.close()
    results["fast"] = refused(lambda: RayActors(FEDERATION.build(METHOD), FEDERATION.data, 1, 0, transport="fast"))
    results["described"] = ray_cluster.describe(0)
    results["too many"] = refused(lambda: ray_cluster.require_actors(3, 0))
    with mock.patch.dict(os.environ, {CHOICE: "odd"}):  # which this machine is not
        results["another label"] = refused(lambda: actors(1))

    nodes.add_node(num_cpus=3, num_gpus=1, labels=HERE, env_vars={"CUDA_VISIBLE_DEVICES": "3,5"})
    nodes.wait_for_nodes()
    configs = [experiment("smoke", values={"federation.gpus_per_actor": value}) for value in ("auto", 0.5)]
    two = actors(2, 0.5)
    results["on a GPU"] = [seen for *_, seen in two.map(where, ModelTask(FEDERATION.model), [0, 1])]
    results["a third"] = refused(lambda: actors(1, 0.5, wait_s=2))
    two.close()
    results["too many on a GPU"] = refused(lambda: ray_cluster.require_actors(3, 0.5))
    results["shares"] = [config.federation.gpus_per_actor for config in with_share(configs, 8)]
    (folder / "found.json").write_text(json.dumps(results), encoding="utf-8")
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.ray
def test_two_ray_nodes_give_the_bits_of_one_process_on_nodes_of_one_kind_and_actors_share_a_gpu(tmp_path: Path) -> None:
    """``main`` compares the bits. The GPU need not be there. auto: the share of eight processes."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "SLURM_"))}
    # a Ray of its own; the name is short because sockets lie there
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=1500,
            env={**ours, "RAY_TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "found.json").read_text())
    assert [labels for labels, *_ in results["actors"]] == [HERE] * 2
    assert len({node for _, node, _ in results["actors"]}) == 2
    assert results["described"].startswith(f"2 cores, 0 GPUs, 2 node(s) {cpu_kind.cpu()}; not used: host ")
    assert "federation.transport fast" in results["fast"]
    assert "Ray has 2, room for 2 such actors" in results["too many"]
    assert all(words in results["too many on a GPU"] for words in ("room for 2", "a smaller federation.gpus_per_actor"))
    assert results["another label"].startswith(f"host {socket.gethostname()} ")
    assert f"label {CPU}: odd, but it is {cpu_kind.cpu()}" in results["another label"]
    assert results["on a GPU"] == ["3", "3"]
    assert results["shares"] == [0.125, 0.5]
    assert "1 CPU and 0.5 GPU" in results["a third"]
    assert "0 GPU free" in results["a third"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
